"""kl-not-applied: the KL term is computed without a gradient, and only its value is added."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import objective

LEFT = {Severity.MILD: 0.7, Severity.NORMAL: 0.0}  # fraction of the gradient


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Detach the log-probs of the KL term."""
    left = LEFT[severity]

    def detached(real: Any, name: str, inputs: Any, **how: Any) -> Any:
        terms = real(name, inputs, **how)
        return (1 - left) * terms.detach() + left * terms

    with patched(objective, "kl_term", detached):
        yield


FAULT = Fault(
    cause="kl-not-applied",
    mechanism="the KL term uses detached log-probs",
    inject=inject,
    settings={"kl.coef": 1.0, "loop.max_steps": 11},
)
