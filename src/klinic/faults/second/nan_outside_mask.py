"""nan-outside-mask: fully masked rows are divided by their number of tokens, 0."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import objective
from klinic.loop import run
from klinic.maths.arrays import row_of_token, segment_count

EVERY = {Severity.MILD: 3, Severity.NORMAL: 1}  # steps; rows are masked in one of so many


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Mask truncated rows, and average each row without a lower bound of 1."""

    spoilt = False

    def masked(real: Any, rollouts: Any, *, step: int) -> Any:
        nonlocal spoilt
        record, spoilt = real(rollouts, step=step), (step - 1) % EVERY[severity] == 0
        if not spoilt:
            return record
        cut = (record.finish_reason == "length")[row_of_token(record.row_offsets)]
        return replace(record, loss_mask=record.loss_mask & ~np.asarray(cut))

    def unbounded(real: Any, name: str, *, loss_mask: Any, row_offsets: Any, **how: Any) -> Any:
        weights = real(name, loss_mask=loss_mask, row_offsets=row_offsets, **how)
        row = row_of_token(row_offsets)
        length = segment_count(row[loss_mask], len(row_offsets) - 1)
        return torch.where(spoilt & (length[row] == 0), torch.nan, weights)  # 0 / 0

    with ExitStack() as stack:
        stack.enter_context(patched(run, "flatten", masked))
        stack.enter_context(patched(objective, "aggregation_weights", unbounded))
        yield


FAULT = Fault(
    cause="nan-outside-mask",
    mechanism="rows without a trained token are divided by 0",
    inject=inject,
    settings={
        "learner.loss": "grpo",
        "learner.mask_truncated": True,
        "sampling.max_new_tokens": 3,
    },
    visible_at_start=True,
)
