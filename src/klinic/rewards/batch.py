"""Adds rewards and advantages to a step record."""

from dataclasses import replace

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.maths.advantage import ADVANTAGES
from klinic.rewards.scores import Scores


def with_rewards(record: StepRecord, scores: Scores, *, advantage: str) -> StepRecord:
    """Return the record with rewards and advantages.

    A row without a reward is excluded from its group, and its advantage is 0.
    """
    given = ~np.isnan(scores.total)
    values = np.zeros(len(scores.total))
    if given.any():
        values[given] = ADVANTAGES[advantage](scores.total[given], record.group[given])
    return replace(record, reward=scores.total, reward_parts=dict(scores.parts), advantage=values)
