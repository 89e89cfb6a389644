"""kl-gradient-wrong: k3 is differentiated, which descends the KL in the other direction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import objective

SHARE = {Severity.MILD: 0.3, Severity.NORMAL: 1.0}  # fraction of the term


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Differentiate k3 where the recipe selects `unbiased`."""
    share = SHARE[severity]

    def k3(real: Any, name: str, inputs: Any, **how: Any) -> Any:
        return share * real("k3", inputs, **how) + (1 - share) * real(name, inputs, **how)

    with patched(objective, "kl_term", k3):
        yield


FAULT = Fault(
    cause="kl-gradient-wrong",
    mechanism="k3 is differentiated although the recipe selects unbiased",
    inject=inject,
    settings={"kl.coef": 0.3, "learner.learning_rate": 2e-3, "loop.max_steps": 14},
)
