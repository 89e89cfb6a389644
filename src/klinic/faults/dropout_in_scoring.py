"""dropout-in-scoring: attention dropout is active while the learner scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import train

RATE = {Severity.MILD: 0.01, Severity.NORMAL: 0.1}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Set the policy's attention dropout after it was validated."""

    def alive(real: Any, recipe: Any, policy: Any, *rest: Any, **how: Any) -> Any:
        for module in policy.lm.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = RATE[severity]
        return real(recipe, policy, *rest, **how)

    with patched(train, "make_learner", alive):
        yield


FAULT = Fault(
    cause="dropout-in-scoring",
    mechanism="attention dropout in training mode",
    inject=inject,
    visible_at_start=True,
)
