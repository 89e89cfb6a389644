"""The rewards of a step: in total, by function, and in statistics under TRL's names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the reward functions said of the completions of one step."""

    total: Float64[np.ndarray, "B"]
    """The weighted sum over the functions that gave a number; NaN where none did."""
    parts: Mapping[str, Float64[np.ndarray, "B"]]
    """By function, unweighted; NaN where it gave no number."""
    num_missing: int
    """Completions without a total."""
    num_nonfinite: int
    """NaNs and infinities returned by functions, which count as none given."""


def statistics(scores: Scores) -> dict[str, float]:
    """Return means and standard deviations (divided by n - 1), and what was missing.

    A mean of nothing, and a standard deviation of fewer than two, is NaN.
    """
    result = {"reward": _mean(scores.total), "reward_std": _std(scores.total)}
    for name, part in scores.parts.items():
        result |= {f"rewards/{name}/mean": _mean(part), f"rewards/{name}/std": _std(part)}
    return result | {
        "reward/missing": float(scores.num_missing),
        "reward/nonfinite": float(scores.num_nonfinite),
    }


def _mean(values: Float64[np.ndarray, "B"]) -> float:
    given = values[~np.isnan(values)]
    with np.errstate(over="ignore"):  # a mean that overflows is infinite, and is seen to be
        return float(given.mean()) if given.size else math.nan


def _std(values: Float64[np.ndarray, "B"]) -> float:
    given = values[~np.isnan(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        return float(given.std(ddof=1)) if given.size > 1 else math.nan
