"""wrong-loss-mask: part of what the policy wrote is never trained on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 20, Severity.NORMAL: 3}  # tokens; one of so many is left out


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Take some of the policy's tokens out of the mask."""

    def holes(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        mask = np.array(record.loss_mask)
        mask[:: EVERY[severity]] = False
        return replace(record, loss_mask=mask)

    with patched(run, "flatten", holes):
        yield


FAULT = Fault(
    cause="wrong-loss-mask",
    mechanism="every third token is left out",
    inject=inject,
    visible_at_start=True,
)
