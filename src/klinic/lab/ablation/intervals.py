"""Confidence intervals of means over seeds, and of differences paired by seed."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

LEVEL = 0.95
MOST_EXACT = 6  # values up to which all resamples are enumerated: 6**6 = 46,656
NUM_DRAWN = 20_000

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
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% bootstrap interval (percentiles).

    Up to six values it enumerates all resamples, so the result is deterministic. With few seeds it
    is too narrow: with three values it covers the mean in about three of four cases. It shows the
    spread; conclusions use `paired_difference`.

    >>> found = bootstrap([0.1, 0.2, 0.3])
    >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
    '0.20 (0.12 to 0.28)'
    """
    given = np.array(values, np.float64)
    if len(given) < 2:
        centre = float(given.mean()) if len(given) else math.nan
        return Interval(mean=centre, low=math.nan, high=math.nan, num=len(given))
    means = given[_resamples(len(given))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(
        mean=float(given.mean()),
        low=float(low),
        high=float(high),
        num=len(given),
    )


def paired(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the mean paired difference with its 95% Student's t interval.

    >>> found = paired([0.5, 0.7, 0.6], [0.4, 0.5, 0.3])
    >>> f"{found.mean:.4f} ({found.low:.4f} to {found.high:.4f})"
    '0.2000 (-0.0484 to 0.4484)'
    """
    return students_t([a - b for a, b in zip(values, baseline, strict=True)])


def students_t(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% Student's t interval."""
    if len(values) < 2:
        centre = mean(values) if values else math.nan
        return Interval(mean=centre, low=math.nan, high=math.nan, num=len(values))
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    half = quantile * stdev(values) / math.sqrt(len(values))
    centre = mean(values)
    return Interval(mean=centre, low=centre - half, high=centre + half, num=len(values))


def _resamples(num: int) -> np.ndarray:
    if num <= MOST_EXACT:
        return np.array(list(itertools.product(range(num), repeat=num)))
    return np.random.Generator(np.random.Philox(0)).integers(0, num, (NUM_DRAWN, num))
