"""misaligned-logp: the sampler's log-probs are stored one token too late."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 2, Severity.NORMAL: 1}  # rows; one in so many is affected


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Shift the reported log-probs by one within rows."""

    def late(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        logp = np.array(record.logp_sampler)
        for row in range(0, record.num_rows, EVERY[severity]):
            part = slice(record.row_offsets[row], record.row_offsets[row + 1])
            logp[part] = np.roll(logp[part], 1)
        return replace(record, logp_sampler=logp)

    with patched(run, "flatten", late):
        yield


FAULT = Fault(
    cause="misaligned-logp",
    mechanism="the sampler's log-probs are stored one token too late",
    inject=inject,
    visible_at_start=True,
)
