"""nan-outside-mask: a non-finite value at an untrained token survives a mask that multiplies."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import objective
from klinic.loop import run

MASKED = 8  # rows whose last token is masked
FROM = {Severity.MILD: 4, Severity.NORMAL: 1}  # first affected step


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Mask some tokens by multiplication."""
    now = {"step": 0}

    def masked(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        now["step"] = step
        mask = np.array(record.loss_mask)
        mask[record.row_offsets[1 : MASKED + 1] - 1] = False
        return replace(record, loss_mask=mask)

    def multiplied(real: Any, values: Any, weights: Any) -> Any:
        if now["step"] < FROM[severity]:
            return real(values, weights)
        sentinel = torch.where(weights == 0, -torch.inf, values)
        return (sentinel * weights).sum()

    with ExitStack() as stack:
        stack.enter_context(patched(run, "flatten", masked))
        stack.enter_context(patched(objective, "weighted_sum", multiplied))
        yield


FAULT = Fault(
    cause="nan-outside-mask",
    mechanism="-inf at untrained tokens, times 0",
    inject=inject,
    visible_at_start=True,
)
