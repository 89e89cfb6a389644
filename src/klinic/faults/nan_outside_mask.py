"""nan-outside-mask: a non-finite value at an untrained token survives a mask that multiplies.

Second mechanism: fully masked rows are divided by their number of tokens, 0.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import objective
from klinic.maths.arrays import row_of_token, segment_count
from klinic.training import run

NUM_MASKED_ROWS = 8  # rows whose last token is masked
FIRST_STEP = {Severity.MILD: 4, Severity.NORMAL: 1}  # first affected step


@contextmanager
def multiply_by_mask(severity: Severity) -> Iterator[None]:
    """Mask some tokens by multiplication."""
    current = {"step": 0}

    def flatten_masked(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        current["step"] = step
        mask = np.array(record.loss_mask)
        mask[record.row_offsets[1 : NUM_MASKED_ROWS + 1] - 1] = False
        return replace(record, loss_mask=mask)

    def multiplied_sum(real: Any, values: Any, weights: Any) -> Any:
        if current["step"] < FIRST_STEP[severity]:
            return real(values, weights)
        sentinel = torch.where(weights == 0, -torch.inf, values)
        return (sentinel * weights).sum()

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(run, "flatten_rollouts", flatten_masked))
        stack.enter_context(patch_attribute(objective, "weighted_sum", multiplied_sum))
        yield


FAULT = Fault(
    cause="nan-outside-mask",
    mechanism="-inf at untrained tokens, times 0",
    inject=multiply_by_mask,
    visible_at_start=True,
)


# steps; rows are masked in one of so many
MASKED_STEP_EVERY = {
    Severity.MILD: 3,
    Severity.NORMAL: 1,
}


@contextmanager
def divide_masked_rows(severity: Severity) -> Iterator[None]:
    """Mask truncated rows, and average each row without a lower bound of 1."""

    is_active = False

    def flatten_without_truncated(real: Any, rollouts: Any, *, step: int) -> Any:
        nonlocal is_active
        record, is_active = real(rollouts, step=step), (step - 1) % MASKED_STEP_EVERY[severity] == 0
        if not is_active:
            return record
        cut = (record.finish_reason == "length")[row_of_token(record.row_offsets)]
        return replace(record, loss_mask=record.loss_mask & ~np.asarray(cut))

    def unbounded_weights(
        real: Any, name: str, *, loss_mask: Any, row_offsets: Any, **options: Any
    ) -> Any:
        weights = real(name, loss_mask=loss_mask, row_offsets=row_offsets, **options)
        row = row_of_token(row_offsets)
        length = segment_count(row[loss_mask], len(row_offsets) - 1)
        return torch.where(is_active & (length[row] == 0), torch.nan, weights)  # 0 / 0

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(run, "flatten_rollouts", flatten_without_truncated))
        stack.enter_context(patch_attribute(objective, "aggregation_weights", unbounded_weights))
        yield


SECOND_FAULT = Fault(
    cause="nan-outside-mask",
    mechanism="rows without a trained token are divided by 0",
    inject=divide_masked_rows,
    settings={
        "learner.loss": "grpo",
        "learner.mask_truncated": True,
        "sampling.max_new_tokens": 3,
    },
    visible_at_start=True,
)
