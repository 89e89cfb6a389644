"""state-lost: the weights of the start are loaded again in the middle of a run.

Second mechanism: the schedule of the learning rate starts over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner
from klinic.learner.update import LearningRate

LOST_AFTER = {Severity.MILD: 10, Severity.NORMAL: 7}  # updates


@contextmanager
def reload_start_weights(severity: Severity) -> Iterator[None]:
    """Copy the weights of the start over those of the policy, and go on."""
    start: dict[int, Tensor] = {}

    def publish_start(real: Any, self: Any) -> Any:
        if not start:
            start.update({id(p): p.detach().clone() for p in self._trained.values()})
        if self._num_updates == LOST_AFTER[severity]:
            with torch.no_grad():
                for parameter in self._trained.values():
                    parameter.copy_(start[id(parameter)])
        return real(self)

    with patch_attribute(LocalLearner, "publish", publish_start):
        yield


FAULT = Fault(
    cause="state-lost",
    mechanism="the weights of the start are loaded again",
    inject=reload_start_weights,
    settings={"learner.learning_rate": 1e-3, "loop.max_steps": 12},
)


@contextmanager
def restart_schedule(severity: Severity) -> Iterator[None]:
    """Count the updates of the schedule from 0 again."""

    def restarted_rate(real: Any, self: Any, num_updates: int) -> float:
        lost_after = LOST_AFTER[severity]
        return float(real(self, num_updates - lost_after * (num_updates >= lost_after)))

    with patch_attribute(LearningRate, "at", restarted_rate):
        yield


SECOND_FAULT = Fault(
    cause="state-lost",
    mechanism="the schedule of the learning rate starts over",
    inject=restart_schedule,
    settings={"learner.warmup_steps": 20, "loop.max_steps": 12},
)
