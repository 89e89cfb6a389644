"""misaligned-logp: log-probs that the sampler did not return are filled in as 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 40, Severity.NORMAL: 4}  # tokens; one of so many is missing


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Lose the log-prob of some tokens, and write 0 in its place."""

    def filled(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        logp = np.array(record.logp_sampler)
        logp[step % EVERY[severity] :: EVERY[severity]] = 0.0
        return replace(record, logp_sampler=logp)

    with patched(run, "flatten", filled):
        yield


FAULT = Fault(
    cause="misaligned-logp",
    mechanism="missing log-probs of the sampler are filled with 0",
    inject=inject,
    visible_at_start=True,
)
