"""step-too-big: an undeclared entropy bonus outweighs the rewards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import local
from klinic.maths.masked import weighted_sum

COEF = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Add the score of minus the entropy, sg(logp) logp, to the policy term."""

    def bonus(real: Any, scores: Any, targets: Any, objective: Any) -> Any:
        parts = real(scores, targets, objective)
        negative = weighted_sum(scores.logp.detach() * scores.logp, targets.policy_weight)
        # gradient only: the value of the loss is unchanged
        return replace(parts, policy=parts.policy + COEF[severity] * (negative - negative.detach()))

    with patched(local, "loss_parts", bonus):
        yield


FAULT = Fault(
    cause="step-too-big",
    mechanism="a hidden entropy bonus outweighs the rewards",
    inject=inject,
    settings={"learner.learning_rate": 1e-3, "loop.max_steps": 10},
)
