"""Confidence intervals of means over seeds, and of differences paired by seed."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

CONFIDENCE = 0.95
MAX_ENUMERATED = 6  # values up to which all resamples are enumerated: 6**6 = 46,656
NUM_RESAMPLES = 20_000

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom; the last is used above 20
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval; the bounds are NaN for a single value."""

    mean: float
    low: float
    high: float
    num: int

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def bootstrap_interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% bootstrap interval (percentiles).

    Up to six values it enumerates all resamples, so the result is deterministic. With few seeds it
    is too narrow: with three values it covers the mean in about three of four cases. It shows the
    spread; conclusions use `paired_difference`.

    >>> found = bootstrap_interval([0.1, 0.2, 0.3])
    >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
    '0.20 (0.12 to 0.28)'
    """
    sample = np.array(values, np.float64)
    if len(sample) < 2:
        centre = float(sample.mean()) if len(sample) else math.nan
        return Interval(mean=centre, low=math.nan, high=math.nan, num=len(sample))
    means = sample[_resample_indices(len(sample))].mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(
        mean=float(sample.mean()),
        low=float(low),
        high=float(high),
        num=len(sample),
    )


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the mean paired difference with its 95% Student's t interval.

    >>> found = paired_difference([0.5, 0.7, 0.6], [0.4, 0.5, 0.3])
    >>> f"{found.mean:.4f} ({found.low:.4f} to {found.high:.4f})"
    '0.2000 (-0.0484 to 0.4484)'
    """
    return t_interval([a - b for a, b in zip(values, baseline, strict=True)])


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% Student's t interval."""
    if len(values) < 2:
        centre = mean(values) if values else math.nan
        return Interval(mean=centre, low=math.nan, high=math.nan, num=len(values))
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    half = quantile * stdev(values) / math.sqrt(len(values))
    centre = mean(values)
    return Interval(mean=centre, low=centre - half, high=centre + half, num=len(values))


def _resample_indices(num: int) -> np.ndarray:
    if num <= MAX_ENUMERATED:
        return np.array(list(itertools.product(range(num), repeat=num)))
    return np.random.Generator(np.random.Philox(0)).integers(0, num, (NUM_RESAMPLES, num))
