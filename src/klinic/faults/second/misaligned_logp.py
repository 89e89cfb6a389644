"""misaligned-logp: log-probs that the sampler did not return are filled with 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 40, Severity.NORMAL: 4}  # tokens; one in so many is missing


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Replace the log-probs of some tokens by 0."""

    def filled(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        logp = np.array(record.logp_sampler)
        logp[step % EVERY[severity] :: EVERY[severity]] = 0.0
        return replace(record, logp_sampler=logp)

    with patched(run, "flatten", filled):
        yield


FAULT = Fault(
    cause="misaligned-logp",
    mechanism="missing sampler log-probs are filled with 0",
    inject=inject,
    visible_at_start=True,
)
