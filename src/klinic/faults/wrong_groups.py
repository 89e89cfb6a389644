"""wrong-groups: rewards are grouped by position, half a group too early."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Compare rewards across group boundaries: of all groups, or of the first two."""

    def shifted(real: Any, record: Any, scores: Any, **how: Any) -> Any:
        group = np.array(record.group)
        size = int((group == group[0]).sum())
        end = len(group) if severity is Severity.NORMAL else 2 * size
        group[:end] = np.roll(group[:end], size // 2)
        spoilt = real(replace(record, group=group), scores, **how)
        return replace(spoilt, group=record.group)

    with patched(run, "with_rewards", shifted):
        yield


FAULT = Fault(
    cause="wrong-groups",
    mechanism="groups start half a group too early",
    inject=inject,
    visible_at_start=True,
)
