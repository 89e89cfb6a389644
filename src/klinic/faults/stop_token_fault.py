"""stop-token-fault: the end token is masked, as if padding and end token shared an id."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

SHARE = {Severity.MILD: 0.7, Severity.NORMAL: 1.0}  # fraction of rows


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Mask the last token of rows that ended on their own."""

    def without_ends(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        stopped = np.flatnonzero(record.finish_reason == "stop")
        chosen = stopped[: round(SHARE[severity] * len(stopped))]
        mask = np.array(record.loss_mask)
        mask[record.row_offsets[chosen + 1] - 1] = False
        return replace(record, loss_mask=mask)

    with patched(run, "flatten", without_ends):
        yield


FAULT = Fault(
    cause="stop-token-fault",
    mechanism="end tokens are masked by their id",
    inject=inject,
    visible_at_start=True,
)
