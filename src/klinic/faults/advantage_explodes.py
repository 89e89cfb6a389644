"""advantage-explodes: a reward is divided by the deviation of the others, without a floor."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

FLOOR = {Severity.MILD: 1e-1, Severity.NORMAL: 1e-6}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Divide by the standard deviation of the other members: 0 if they are equal."""

    def spoilt(real: Any, record: Any, scores: Any, **how: Any) -> Any:
        record = real(record, scores, **how)
        advantage = np.array(record.advantage)
        for row, group in enumerate(record.group):
            others = scores.total[(record.group == group) & (np.arange(len(advantage)) != row)]
            gap = scores.total[row] - others.mean()
            advantage[row] = gap / (others.std() + FLOOR[severity])
        return replace(record, advantage=np.nan_to_num(advantage))

    with patched(run, "with_rewards", spoilt):
        yield


FAULT = Fault(
    cause="advantage-explodes",
    mechanism="standard deviation of the other members, without a floor",
    inject=inject,
    settings={"learner.advantage": "group_std"},
    visible_at_start=True,
)
