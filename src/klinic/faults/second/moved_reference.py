"""moved-reference: the reference is replaced by the policy after every second update."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.local import LocalLearner

EVERY = {Severity.MILD: 1, Severity.NORMAL: 2}  # updates
SHARE = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}  # interpolation towards the policy


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Copy the policy into the reference, as after a resume that lost the initial weights."""

    @torch.no_grad()
    def anchored(real: Any, learner: Any, **how: Any) -> Any:
        found = real(learner, **how)
        if learner._num_updates % EVERY[severity] == 0:
            theirs = learner._reference.scorer.parameters()
            for mine, other in zip(learner._scorer.parameters(), theirs, strict=True):
                other.lerp_(mine, SHARE[severity])
        return found

    with patched(LocalLearner, "commit", anchored):
        yield


FAULT = Fault(
    cause="moved-reference",
    mechanism="the reference becomes the policy every second update",
    inject=inject,
)
