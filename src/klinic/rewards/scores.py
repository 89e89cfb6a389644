"""The rewards of a step: totals, per function, and statistics under TRL's names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64

LOST = ("timeouts", "crashed", "failed")
"""Reasons for a missing value: time limit, dead process, failing judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
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


def joined(parts: Sequence[Scores]) -> Scores:
    """Concatenate the scores of several batches."""
    if len(parts) == 1:
        return parts[0]
    kinds = dict.fromkeys(kind for part in parts for kind in part.lost)
    return Scores(
        total=np.concatenate([part.total for part in parts]),
        parts={name: np.concatenate([p.parts[name] for p in parts]) for name in parts[0].parts},
        num_missing=sum(part.num_missing for part in parts),
        num_nonfinite=sum(part.num_nonfinite for part in parts),
        lost={kind: sum(part.lost.get(kind, 0) for part in parts) for kind in kinds},
    )


def taken(scores: Scores, rows: Sequence[int]) -> Scores:
    """Select the scores of some completions; the counts still cover all."""
    return replace(
        scores,
        total=scores.total[rows],
        parts={name: part[rows] for name, part in scores.parts.items()},
    )


def statistics(scores: Scores) -> dict[str, float]:
    """Return means, standard deviations (divided by n - 1), and counts of missing values.

    The mean of no values and the standard deviation of fewer than two are NaN.
    """
    result = {"reward": mean(scores.total), "reward_std": _std(scores.total)}
    for name, part in scores.parts.items():
        result |= {f"rewards/{name}/mean": mean(part), f"rewards/{name}/std": _std(part)}
    return result | {
        "reward/missing": float(scores.num_missing),
        "reward/nonfinite": float(scores.num_nonfinite),
        **{f"reward/{kind}": float(scores.lost.get(kind, 0)) for kind in LOST},
    }


def mean(values: Float64[np.ndarray, "B"]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    given = values[~np.isnan(values)]
    return float(given.mean()) if given.size else math.nan


def _std(values: Float64[np.ndarray, "B"]) -> float:
    given = values[~np.isnan(values)]
    return float(given.std(ddof=1)) if given.size > 1 else math.nan
