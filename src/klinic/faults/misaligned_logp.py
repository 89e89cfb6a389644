"""misaligned-logp: the sampler's log-probs are stored one token too late.

Second mechanism: log-probs that the sampler did not return are filled with 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run

SHIFTED_ROW_EVERY = {Severity.MILD: 2, Severity.NORMAL: 1}  # rows; one in so many is affected


@contextmanager
def shift_sampler_logps(severity: Severity) -> Iterator[None]:
    """Shift the reported log-probs by one within rows."""

    def flatten_shifted(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        logp = np.array(record.logp_sampler)
        for row in range(0, record.num_rows, SHIFTED_ROW_EVERY[severity]):
            part = slice(record.row_offsets[row], record.row_offsets[row + 1])
            logp[part] = np.roll(logp[part], 1)
        return replace(record, logp_sampler=logp)

    with patch_attribute(run, "flatten_rollouts", flatten_shifted):
        yield


FAULT = Fault(
    cause="misaligned-logp",
    mechanism="the sampler's log-probs are stored one token too late",
    inject=shift_sampler_logps,
    visible_at_start=True,
)


MISSING_LOGP_EVERY = {Severity.MILD: 40, Severity.NORMAL: 4}  # tokens; one in so many is missing


@contextmanager
def zero_missing_logps(severity: Severity) -> Iterator[None]:
    """Replace the log-probs of some tokens by 0."""

    def flatten_filled(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        logp = np.array(record.logp_sampler)
        logp[step % MISSING_LOGP_EVERY[severity] :: MISSING_LOGP_EVERY[severity]] = 0.0
        return replace(record, logp_sampler=logp)

    with patch_attribute(run, "flatten_rollouts", flatten_filled):
        yield


SECOND_FAULT = Fault(
    cause="misaligned-logp",
    mechanism="missing sampler log-probs are filled with 0",
    inject=zero_missing_logps,
    visible_at_start=True,
)
