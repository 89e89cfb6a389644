"""advantage-explodes: a reward is divided by the deviation of the others, without a floor.

Second mechanism: a group spans several ranks, and each divides by its own deviation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run

OTHERS_STD_FLOOR = {Severity.MILD: 1e-1, Severity.NORMAL: 1e-6}


@contextmanager
def divide_by_others_std(severity: Severity) -> Iterator[None]:
    """Divide by the standard deviation of the other members: 0 if they are equal."""

    def with_others_std(real: Any, record: Any, scores: Any, **options: Any) -> Any:
        record = real(record, scores, **options)
        advantage = np.array(record.advantage)
        for row, group in enumerate(record.group):
            other_rewards = scores.total[
                (record.group == group) & (np.arange(len(advantage)) != row)
            ]
            difference = scores.total[row] - other_rewards.mean()
            advantage[row] = difference / (other_rewards.std() + OTHERS_STD_FLOOR[severity])
        return replace(record, advantage=np.nan_to_num(advantage))

    with patch_attribute(run, "with_rewards", with_others_std):
        yield


FAULT = Fault(
    cause="advantage-explodes",
    mechanism="standard deviation of the other members, without a floor",
    inject=divide_by_others_std,
    settings={"learner.advantage": "group_std"},
    visible_at_start=True,
)


ROWS_PER_RANK = 2  # rows per rank
RANK_STD_FLOOR = {Severity.MILD: 1e-1, Severity.NORMAL: 1e-4}


@contextmanager
def divide_by_rank_std(severity: Severity) -> Iterator[None]:
    """Use the group mean and the standard deviation of two members: 0 if they are equal."""

    def with_rank_std(real: Any, record: Any, scores: Any, **options: Any) -> Any:
        record = real(record, scores, **options)
        total, advantage = scores.total, np.array(record.advantage)
        for start in range(0, len(total), ROWS_PER_RANK):
            part = slice(start, start + ROWS_PER_RANK)
            mean = total[record.group == record.group[start]].mean()
            advantage[part] = (total[part] - mean) / max(
                total[part].std(), RANK_STD_FLOOR[severity]
            )
        return replace(record, advantage=np.nan_to_num(advantage))

    with patch_attribute(run, "with_rewards", with_rank_std):
        yield


SECOND_FAULT = Fault(
    cause="advantage-explodes",
    mechanism="standard deviation of two members of the group",
    inject=divide_by_rank_std,
    settings={"learner.advantage": "group_std"},
    visible_at_start=True,
)
