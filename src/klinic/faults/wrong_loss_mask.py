"""wrong-loss-mask: some of the policy's tokens are never trained on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 20, Severity.NORMAL: 3}  # tokens; one in so many is masked


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Mask some of the policy's tokens."""

    def holes(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        mask = np.array(record.loss_mask)
        mask[:: EVERY[severity]] = False
        return replace(record, loss_mask=mask)

    with patched(run, "flatten", holes):
        yield


FAULT = Fault(
    cause="wrong-loss-mask",
    mechanism="every third token is masked",
    inject=inject,
    visible_at_start=True,
)
