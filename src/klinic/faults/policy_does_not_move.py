"""policy-does-not-move: weights are kept in bf16, and updates are rounded away."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.local import LocalLearner
from klinic.learner.update import LearningRate

SHRUNK = {Severity.MILD: 0.03, Severity.NORMAL: 0.001}  # of the rate


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Round all weights to bf16 before and behind every small update."""

    def rounded(real: Any, self: Any, **how: Any) -> Any:
        _round(self._policy.lm)
        found = real(self, **how)
        _round(self._policy.lm)
        return found

    def published(real: Any, self: Any) -> Any:
        _round(self._policy.lm)
        return real(self)

    def smaller(real: Any, self: Any, num_updates: int) -> float:
        return SHRUNK[severity] * float(real(self, num_updates))

    with ExitStack() as stack:
        stack.enter_context(patched(LocalLearner, "commit", rounded))
        stack.enter_context(patched(LocalLearner, "publish", published))
        stack.enter_context(patched(LearningRate, "at", smaller))
        yield


@torch.no_grad()
def _round(lm: Any) -> None:
    for p in lm.parameters():
        p.copy_(p.bfloat16())


FAULT = Fault(
    cause="policy-does-not-move",
    mechanism="updates below the rounding of bf16",
    inject=inject,
)
