"""Power before the runs: how many seeds or starts show a difference, given a spread.

A comparison is a paired Student's t test over n independent values (seeds, or means of starts) of
standard deviation `spread`. The power follows from the noncentral t distribution, integrated over
the estimated standard deviation. Assumes normal differences.

A pilot of a few seeds knows its spread badly, so plans use the upper limit of a one-sided interval
of 80% (R. Browne, "On the Use of a Pilot Sample for Sample Size Determination", 1995).
"""

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np

from klinic.lab.ablation.intervals import student_quantile

LEVEL = 0.05
POWER = 0.8
PILOT_CONFIDENCE = 0.8
MOST = 10_000  # values; more are not searched
NUM_POINTS = 4001  # of the integral over the estimated standard deviation


def difference_power(difference: float, *, spread: float, num: int, level: float = LEVEL) -> float:
    """Return the probability that the two-sided test finds this true difference.

    >>> round(difference_power(1.0, spread=1.0, num=10), 3)
    0.803
    """
    shift = difference * math.sqrt(num) / spread
    scale, weight = _estimated_scales(num - 1)
    bound = student_quantile(num - 1, 1 - level) * scale
    return float(((_normal(shift - bound) + _normal(-shift - bound)) * weight).sum())


def equivalence_power(margin: float, *, spread: float, num: int, level: float = LEVEL) -> float:
    """Return the probability of finding a true difference of 0 equivalent within the margin."""
    scale, weight = _estimated_scales(num - 1)
    room = margin * math.sqrt(num) / spread - student_quantile(num - 1, 1 - 2 * level) * scale
    return float((np.maximum(0.0, 2 * _normal(room) - 1) * weight).sum())


def num_needed(difference: float, *, spread: float, level: float = LEVEL) -> int | None:
    """Return the smallest n with a power of 80%; None beyond 10,000.

    >>> num_needed(1.0, spread=1.0)
    10
    """
    return _smallest_num(partial(difference_power, difference, spread=spread, level=level))


def num_for_equivalence(margin: float, *, spread: float, level: float = LEVEL) -> int | None:
    """Return the smallest n that finds equals equivalent with a power of 80%."""
    return _smallest_num(partial(equivalence_power, margin, spread=spread, level=level))


def smallest_difference(*, spread: float, num: int, level: float = LEVEL) -> float:
    """Return the true difference that n values find with a power of 80%, by bisection."""
    low, high = 0.0, spread
    while difference_power(high, spread=spread, num=num, level=level) < POWER:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if difference_power(middle, spread=spread, num=num, level=level) < POWER:
            low = middle
        else:
            high = middle
    return high


def spread_limit(spread: float, degrees: int) -> float:
    """Return the standard deviation that the true one is below with a confidence of 80%.

    >>> round(spread_limit(1.0, 4), 2), round(spread_limit(1.0, 16), 2)
    (1.56, 1.2)
    """
    scale, weight = _estimated_scales(degrees)
    below = np.cumsum(weight) - weight / 2
    return spread / float(np.interp(1 - PILOT_CONFIDENCE, below, scale))


def spread_of_starts(between: float, within: float, seeds: int) -> float:
    """Return the standard deviation of the mean of a start with this many seeds.

    >>> round(spread_of_starts(0.03, 0.04, 1), 3), round(spread_of_starts(0.03, 0.04, 10), 3)
    (0.05, 0.033)
    """
    return math.sqrt(between**2 + within**2 / seeds)


def _smallest_num(power_of: Callable[..., float]) -> int | None:
    low, high = 1, 2
    while power_of(num=high) < POWER:
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if power_of(num=middle) < POWER:
            low = middle
        else:
            high = middle
    return high


@cache
def _estimated_scales(degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values of the estimated standard deviation, with weights, if the true one is 1."""
    reach = 9 / math.sqrt(2 * degrees)
    scale = np.linspace(max(1e-9, 1 - reach), 1 + reach, NUM_POINTS)
    log_density = (degrees - 1) * np.log(scale) - degrees * scale**2 / 2
    density = np.exp(log_density - log_density.max())
    return scale, density / density.sum()


def _normal(values: np.ndarray) -> np.ndarray:
    """Return the standard normal distribution function."""
    return np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in values.tolist()])
