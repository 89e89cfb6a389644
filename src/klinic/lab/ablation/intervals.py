"""Student's t over seeds: intervals of means, paired differences, and Holm's correction.

Assumes that the seeds are independent and their values about normal. What all trials share (start,
held-out questions) is a condition of every interval and not part of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev

CONFIDENCE = 0.95
MIN_RELATIVE_SPREAD = 1e-9  # below it the values are equal, up to rounding


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Interval):
    """A mean paired difference with its interval, and the test of the hypothesis that it is 0."""

    p_value: float
    """Of this test alone; NaN for a single pair."""
    p_corrected: float
    """After Holm's correction for all tests of the page."""

    @property
    def is_significant(self) -> bool:
        """Whether the corrected test rejects a difference of 0."""
        return self.p_corrected < 1 - CONFIDENCE


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% Student's t interval.

    >>> found = mean_interval([0.1, 0.2, 0.3])
    >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
    '0.20 (-0.05 to 0.45)'
    """
    centre = mean(values) if values else math.nan
    if len(values) < 2:
        return Interval(mean=centre, low=math.nan, high=math.nan, num=len(values))
    half = student_quantile(len(values) - 1) * _standard_error(values)
    return Interval(mean=centre, low=centre - half, high=centre + half, num=len(values))


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Return the mean paired difference with its 95% Student's t interval and its p-value.

    The p-value is corrected for one test; `correct_by_holm` corrects several. Equal differences
    have no spread to test against: their p-value is 1.

    >>> found = paired_difference([0.5, 0.7, 0.6], [0.4, 0.5, 0.3])
    >>> f"{found.mean:.4f} ({found.low:.4f} to {found.high:.4f}), p {found.p_value:.4f}"
    '0.2000 (-0.0484 to 0.4484), p 0.0742'
    """
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    interval = mean_interval(differences)
    p_value = _test_zero_mean(differences) if interval.num > 1 else math.nan
    return Difference(
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        num=interval.num,
        p_value=p_value,
        p_corrected=p_value,
    )


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected so that any false rejection among them has at most 5%.

    Source: S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (1979).

    >>> [round(p, 4) for p in correct_by_holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def student_p_value(statistic: float, degrees: int) -> float:
    """Return the probability that |t| exceeds |statistic|, for a whole number of degrees.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.3 and 26.7.4.

    >>> round(student_p_value(12.7062, 1), 5)
    0.05
    """
    angle = math.atan(abs(statistic) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return max(0.0, 1 - inside)


@cache
def student_quantile(degrees: int) -> float:
    """Return the t that |t| exceeds with 5%, by bisection."""
    low, high = 1.9, 13.0  # of infinitely many degrees 1.96, of one 12.71
    for _ in range(60):
        middle = (low + high) / 2
        if student_p_value(middle, degrees) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def _test_zero_mean(values: Sequence[float]) -> float:
    spread = stdev(values)
    if spread <= MIN_RELATIVE_SPREAD * max(map(abs, values)):
        return 1.0
    return student_p_value(mean(values) / _standard_error(values), len(values) - 1)


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))
