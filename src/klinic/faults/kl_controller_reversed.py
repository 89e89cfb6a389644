"""kl-controller-reversed: the controller divides the coefficient where it should multiply it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.maths.kl_coef import KLCoefState
from klinic.training import kl_control

STRENGTH = {Severity.MILD: 0.3, Severity.NORMAL: 1.0}  # of the change, in the wrong direction


@contextmanager
def reverse_controller(severity: Severity) -> Iterator[None]:
    """Move the coefficient away from where the controller would move it."""

    def reversed_update(real: Any, rule: Any, state: KLCoefState, kl: float) -> KLCoefState:
        updated: KLCoefState = real(rule, state, kl)
        change = updated.coef / max(state.coef, 1e-12)
        coef = state.coef * change ** -STRENGTH[severity]
        return replace(updated, coef=min(max(coef, rule.low), rule.high))

    with patch_attribute(kl_control, "update", reversed_update):
        yield


FAULT = Fault(
    cause="kl-controller-reversed",
    mechanism="the coefficient is divided where it should be multiplied",
    inject=reverse_controller,
    settings={
        "kl.controller": "ziegler",
        "kl.target": 0.002,
        "kl.coef": 0.05,
        "learner.learning_rate": 1e-3,
        "loop.max_steps": 16,
    },
)
