"""The rewards of a step: totals, per function, and statistics under TRL's names.

The soft length penalty grows from 0 to -1 before the hard length limit.

Source: Yu et al., "DAPO" (2025), section 3.4, equation 13.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64, Int

from klinic.evidence.record import StepRecord
from klinic.maths.advantage import ADVANTAGES

LOST_REASONS = ("timeouts", "crashed", "failed")
"""Reasons for a missing value: time limit, dead process, failing judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewards:
    """The rewards of the completions of one step."""

    total: Float64[np.ndarray, "B"]
    """Weighted sum over the functions that returned a number; NaN where none did."""
    parts: Mapping[str, Float64[np.ndarray, "B"]]
    """Unweighted values by function; NaN where it returned none."""
    num_missing: int
    """Completions without a total."""
    num_nonfinite: int
    """Returned values that are NaN, infinite or too large; they count as missing."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Completions without a value, by reason."""


def concat_scores(parts: Sequence[StepRewards]) -> StepRewards:
    """Concatenate the scores of several batches."""
    if len(parts) == 1:
        return parts[0]
    kinds = dict.fromkeys(kind for part in parts for kind in part.lost)
    return StepRewards(
        total=np.concatenate([part.total for part in parts]),
        parts={name: np.concatenate([p.parts[name] for p in parts]) for name in parts[0].parts},
        num_missing=sum(part.num_missing for part in parts),
        num_nonfinite=sum(part.num_nonfinite for part in parts),
        lost={kind: sum(part.lost.get(kind, 0) for part in parts) for kind in kinds},
    )


def select_scores(scores: StepRewards, rows: Sequence[int]) -> StepRewards:
    """Select the scores of some completions; the counts still cover all."""
    return replace(
        scores,
        total=scores.total[rows],
        parts={name: part[rows] for name, part in scores.parts.items()},
    )


def remove_rewards(scores: StepRewards, rows: Sequence[int]) -> StepRewards:
    """Return the scores with no reward in some rows; the parts and counts stay."""
    if not rows:
        return scores
    total = scores.total.copy()
    total[list(rows)] = np.nan
    return replace(scores, total=total)


def reward_statistics(scores: StepRewards) -> dict[str, float]:
    """Return means, standard deviations (divided by n - 1), and counts of missing values.

    The mean of no values and the standard deviation of fewer than two are NaN.
    """
    result = {"reward": nan_mean(scores.total), "reward_std": _nan_std(scores.total)}
    for name, part in scores.parts.items():
        result |= {f"rewards/{name}/mean": nan_mean(part), f"rewards/{name}/std": _nan_std(part)}
    return result | {
        "reward/missing": float(scores.num_missing),
        "reward/nonfinite": float(scores.num_nonfinite),
        **{f"reward/{kind}": float(scores.lost.get(kind, 0)) for kind in LOST_REASONS},
    }


def nan_mean(values: Float64[np.ndarray, "B"]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if valid.size else math.nan


def _nan_std(values: Float64[np.ndarray, "B"]) -> float:
    valid = values[~np.isnan(values)]
    return float(valid.std(ddof=1)) if valid.size > 1 else math.nan


def with_rewards(record: StepRecord, scores: StepRewards, *, advantage: str) -> StepRecord:
    """Return the record with rewards and advantages.

    A row without a reward is excluded from its group, and its advantage is 0.
    """
    has_reward = ~np.isnan(scores.total)
    values = np.zeros(len(scores.total))
    if has_reward.any():
        values[has_reward] = ADVANTAGES[advantage](
            scores.total[has_reward], record.group[has_reward]
        )
    return replace(record, reward=scores.total, reward_parts=dict(scores.parts), advantage=values)


OVERLONG = "overlong"


def overlong_penalty(
    lengths: Int[np.ndarray, "B"], *, limit: int, buffer: int
) -> Float64[np.ndarray, "B"]:
    """Return the penalty of each completion by its number of tokens.

    >>> overlong_penalty(np.array([80, 90, 95, 100]), limit=100, buffer=10).tolist()
    [0.0, 0.0, -0.5, -1.0]
    """
    return -np.clip((lengths - (limit - buffer)) / buffer, 0.0, 1.0) + 0.0  # no -0.0


def add_overlong_penalty(scores: StepRewards, penalty: Float64[np.ndarray, "B"]) -> StepRewards:
    """Add the penalty to the scores; a completion without a reward keeps none."""
    return replace(scores, total=scores.total + penalty, parts={**scores.parts, OVERLONG: penalty})
