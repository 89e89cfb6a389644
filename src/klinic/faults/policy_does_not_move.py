"""policy-does-not-move: weights are stored in bf16, and updates are lost to rounding."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.update import LearningRate
from klinic.loop import train

SHRUNK = {Severity.MILD: 0.03, Severity.NORMAL: 0.001}  # factor of the learning rate


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Load the weights in bf16, and round them after every small update."""

    begun: list[bool] = []

    def rounded(real: Any, self: Any, *given: Any, **how: Any) -> Any:
        found = real(self, *given, **how)
        if begun:  # not during the warm start
            _round(p for group in self.param_groups for p in group["params"])
        return found

    def loaded(real: Any, *given: Any) -> Any:
        policy, where = real(*given)
        _round(policy.lm.parameters())
        begun.append(True)
        return policy, where

    def smaller(real: Any, self: Any, num_updates: int) -> float:
        return SHRUNK[severity] * float(real(self, num_updates))

    with ExitStack() as stack:
        stack.enter_context(patched(torch.optim.AdamW, "step", rounded))
        stack.enter_context(patched(train, "start_policy", loaded))
        stack.enter_context(patched(LearningRate, "at", smaller))
        yield


@torch.no_grad()
def _round(parameters: Iterable[Any]) -> None:
    for p in parameters:
        p.copy_(p.bfloat16())


FAULT = Fault(
    cause="policy-does-not-move",
    mechanism="updates below bf16 rounding",
    inject=inject,
)
