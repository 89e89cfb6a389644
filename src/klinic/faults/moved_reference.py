"""moved-reference: the reference shares the policy's weights.

Second mechanism: the reference is replaced by the policy after every second update.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner

COPY_EVERY = {Severity.MILD: 3, Severity.NORMAL: 1}  # updates


@contextmanager
def share_reference_weights(severity: Severity) -> Iterator[None]:
    """Copy the policy into the reference before scoring."""

    def score_after_copy(real: Any, self: Any, *args: Any, **options: Any) -> Any:
        if self._num_updates % COPY_EVERY[severity] == 0 and self.reference is not None:
            self.reference.scorer.lm.load_state_dict(self.policy.lm.state_dict())
        return real(self, *args, **options)

    with patch_attribute(LocalLearner, "score", score_after_copy):
        yield


FAULT = Fault(
    cause="moved-reference", mechanism="the reference is the policy", inject=share_reference_weights
)


INTERPOLATE_EVERY = {Severity.MILD: 1, Severity.NORMAL: 2}  # updates
# interpolation towards the policy
INTERPOLATION_WEIGHT = {
    Severity.MILD: 0.1,
    Severity.NORMAL: 1.0,
}


@contextmanager
def interpolate_reference(severity: Severity) -> Iterator[None]:
    """Copy the policy into the reference, as after a resume that lost the initial weights."""

    @torch.no_grad()
    def commit_and_interpolate(real: Any, learner: Any, **options: Any) -> Any:
        result = real(learner, **options)
        if learner._num_updates % INTERPOLATE_EVERY[severity] == 0:
            reference_weights = learner.reference.scorer.parameters()
            for policy_weight, reference_weight in zip(
                learner.scorer.parameters(), reference_weights, strict=True
            ):
                reference_weight.lerp_(policy_weight, INTERPOLATION_WEIGHT[severity])
        return result

    with patch_attribute(LocalLearner, "commit", commit_and_interpolate):
        yield


SECOND_FAULT = Fault(
    cause="moved-reference",
    mechanism="the reference becomes the policy every second update",
    inject=interpolate_reference,
)
