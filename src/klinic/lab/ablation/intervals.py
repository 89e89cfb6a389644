"""Student's t over independent values: intervals of means, paired differences, Holm's correction.

Assumes that the values (seeds, or means of starts) are independent and about normal; coverage.py
measures what is left of 95% where they are not. What all trials share (start, held-out questions)
is a condition of every interval and not part of it.

Fractions of m questions lie on a grid of step 1/m, so a few seeds can be equal by coincidence. The
standard deviation of such values is taken to be at least half a step: n equal values then have an
interval about as wide as the rule of three allows. Equal values off any grid have no interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev

CONFIDENCE = 0.95
MIN_RELATIVE_SPREAD = 1e-9  # below it the values are equal, up to rounding
MIN_GRID_STEP = 1e-4  # finer values are treated as continuous
MIN_GRID_VALUES = 3  # distinct values that show a grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval; the bounds are NaN for one value or equal ones."""

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

    standard_error: float
    p_value: float
    """Of this test alone; NaN for a single pair."""
    p_corrected: float
    """After the correction for all tests of the page."""
    p_outside: float = math.nan
    """Of the test of equivalence alone; NaN without a margin."""
    p_outside_corrected: float = math.nan

    @property
    def is_significant(self) -> bool:
        """Whether the corrected test rejects a difference of 0."""
        return self.p_corrected < 1 - CONFIDENCE


def mean_interval(values: Sequence[float], *, grid: float = 0.0) -> Interval:
    """Return the mean with its 95% Student's t interval; `grid` is the step of the values.

    >>> found = mean_interval([0.1, 0.2, 0.3])
    >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
    '0.20 (-0.05 to 0.45)'
    >>> equal = mean_interval([1.0, 1.0, 1.0], grid=0.005)
    >>> f"{equal.mean:.4f} ({equal.low:.4f} to {equal.high:.4f})"
    '1.0000 (0.9938 to 1.0062)'
    """
    centre = mean(values) if values else math.nan
    error = standard_error(values, grid=grid)
    half = student_quantile(len(values) - 1) * error if error > 0 else math.nan
    return Interval(mean=centre, low=centre - half, high=centre + half, num=len(values))


def paired_difference(
    values: Sequence[float], baseline: Sequence[float], *, grid: float = 0.0
) -> Difference:
    """Return the mean paired difference with its 95% Student's t interval and its p-value.

    The p-value is corrected for one test; `correct_by_holm` corrects several. Equal differences
    off a grid have no spread to test against: their p-value is 1.

    >>> found = paired_difference([0.5, 0.7, 0.6], [0.4, 0.5, 0.3])
    >>> f"{found.mean:.4f} ({found.low:.4f} to {found.high:.4f}), p {found.p_value:.4f}"
    '0.2000 (-0.0484 to 0.4484), p 0.0742'
    """
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    interval = mean_interval(differences, grid=grid)
    error = standard_error(differences, grid=grid)
    p_value = student_p_value(interval.mean / error, interval.num - 1) if error > 0 else 1.0
    p_value = p_value if interval.num > 1 else math.nan
    return Difference(
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        num=interval.num,
        standard_error=error,
        p_value=p_value,
        p_corrected=p_value,
    )


def standard_error(values: Sequence[float], *, grid: float = 0.0) -> float:
    """Return the standard error of the mean; NaN for one value, 0 for equal ones off a grid."""
    if len(values) < 2:
        return math.nan
    spread = stdev(values)
    if spread <= MIN_RELATIVE_SPREAD * max(map(abs, values)):
        spread = 0.0
    return max(spread, grid / 2) / math.sqrt(len(values))


def grid_step(values: Sequence[float]) -> float:
    """Return the coarsest step 1/m of which all values are multiples; 0 if there is none.

    >>> grid_step([0.82, 0.835, 0.81, 0.8])
    0.005
    >>> grid_step([0.8213077, 0.8354211, 0.8123987])
    0.0
    """
    return _find_step(frozenset(values))


@cache
def _find_step(values: frozenset[float]) -> float:
    if len(values) < MIN_GRID_VALUES:
        return 0.0
    for num in range(1, round(1 / MIN_GRID_STEP) + 1):
        if all(abs(value * num - round(value * num)) < 1e-9 * num for value in values):
            return 1 / num
    return 0.0


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
def student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t that |t| exceeds with probability 1 - confidence, by bisection.

    >>> round(student_quantile(2), 3), round(student_quantile(9, 0.9), 3)
    (4.303, 1.833)
    """
    low, high = 0.0, 1.0
    while student_p_value(high, degrees) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if student_p_value(middle, degrees) > 1 - confidence:
            low = middle
        else:
            high = middle
    return low
