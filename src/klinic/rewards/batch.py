"""Rewards and advantages put to the rows of a step."""

from dataclasses import replace

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.maths.advantage import ADVANTAGES
from klinic.rewards.scores import Scores


def with_rewards(record: StepRecord, scores: Scores, *, advantage: str) -> StepRecord:
    """Return the record with rewards and advantages.

    A row that no function judged has no part in its group: the others are compared without it, and
    its advantage is 0.
    """
    given = ~np.isnan(scores.total)
    values = np.zeros(len(scores.total))
    if given.any():
        values[given] = ADVANTAGES[advantage](scores.total[given], record.group[given])
    return replace(record, reward=scores.total, reward_parts=dict(scores.parts), advantage=values)
