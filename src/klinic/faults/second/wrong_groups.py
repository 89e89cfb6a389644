"""wrong-groups: rewards are ordered by prompt, and are grouped as if ordered by sample."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

PROMPTS = {Severity.MILD: 2, Severity.NORMAL: 1_000_000}  # prompts of a step that are affected


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Compare each reward with one of every other prompt."""

    def interleaved(real: Any, record: Any, scores: Any, **how: Any) -> Any:
        group = np.array(record.group)
        mixed = np.flatnonzero(group < PROMPTS[severity])
        group[mixed] = np.arange(len(mixed)) % len(np.unique(group[mixed]))
        spoilt = real(replace(record, group=group), scores, **how)
        return replace(spoilt, group=record.group)

    with patched(run, "with_rewards", interleaved):
        yield


FAULT = Fault(
    cause="wrong-groups",
    mechanism="groups are formed along the wrong axis",
    inject=inject,
    visible_at_start=True,
)
