"""advantage-explodes: a group spans several ranks, and each divides by its own deviation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

PART = 2  # rows per rank
FLOOR = {Severity.MILD: 1e-1, Severity.NORMAL: 1e-4}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Use the group mean and the standard deviation of two members: 0 if they are equal."""

    def spoilt(real: Any, record: Any, scores: Any, **how: Any) -> Any:
        record = real(record, scores, **how)
        total, advantage = scores.total, np.array(record.advantage)
        for start in range(0, len(total), PART):
            part = slice(start, start + PART)
            mean = total[record.group == record.group[start]].mean()
            advantage[part] = (total[part] - mean) / max(total[part].std(), FLOOR[severity])
        return replace(record, advantage=np.nan_to_num(advantage))

    with patched(run, "with_rewards", spoilt):
        yield


FAULT = Fault(
    cause="advantage-explodes",
    mechanism="standard deviation of two members of the group",
    inject=inject,
    settings={"learner.advantage": "group_std"},
    visible_at_start=True,
)
