"""step-too-big: the learning rate is thirty times the usual one.

Second mechanism: an undeclared entropy bonus outweighs the rewards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import micro_batch_loss
from klinic.learner.update import LearningRate
from klinic.maths.masked import weighted_sum

RATE_MULTIPLE = {Severity.MILD: 10.0, Severity.NORMAL: 30.0}


@contextmanager
def scale_learning_rate(severity: Severity) -> Iterator[None]:
    """Multiply the learning rate of every update."""

    def larger_rate(real: Any, self: Any, num_updates: int) -> float:
        return RATE_MULTIPLE[severity] * float(real(self, num_updates))

    with patch_attribute(LearningRate, "at", larger_rate):
        yield


FAULT = Fault(cause="step-too-big", mechanism="learning rate times 30", inject=scale_learning_rate)


ENTROPY_COEF = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}


@contextmanager
def add_entropy_bonus(severity: Severity) -> Iterator[None]:
    """Add the score of minus the entropy, sg(logp) logp, to the policy term."""

    def terms_with_bonus(real: Any, scores: Any, targets: Any, objective: Any) -> Any:
        parts = real(scores, targets, objective)
        negative = weighted_sum(scores.logp.detach() * scores.logp, targets.policy_weight)
        # gradient only: the value of the loss is unchanged
        return replace(
            parts, policy=parts.policy + ENTROPY_COEF[severity] * (negative - negative.detach())
        )

    with patch_attribute(micro_batch_loss, "loss_terms", terms_with_bonus):
        yield


SECOND_FAULT = Fault(
    cause="step-too-big",
    mechanism="a hidden entropy bonus outweighs the rewards",
    inject=add_entropy_bonus,
    settings={"learner.learning_rate": 1e-3, "loop.max_steps": 10},
)
