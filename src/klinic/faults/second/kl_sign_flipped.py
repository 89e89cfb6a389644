"""kl-sign-flipped: the KL in the reward is added as a bonus, not subtracted as a cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import objective

STRENGTH = {Severity.MILD: 0.2, Severity.NORMAL: 1.0}  # of the bonus, the cost being 1


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Keep the value of the KL term, and negate its gradient."""
    strength = STRENGTH[severity]

    def bonus(real: Any, name: str, inputs: Any, **how: Any) -> Any:
        terms = real(name, inputs, **how)
        return (1 + strength) * terms.detach() - strength * terms

    with patched(objective, "kl_term", bonus):
        yield


FAULT = Fault(
    cause="kl-sign-flipped",
    mechanism="the KL in the reward is a bonus",
    inject=inject,
    settings={"kl.estimator": "k1_reward", "kl.coef": 0.5, "loop.max_steps": 11},
)
