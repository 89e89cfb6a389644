"""Tests whether a difference lies within a margin, and decides: better, worse, equivalent or open.

Two one-sided tests: a difference is equivalent within the margin M if "at most -M" and "at least M"
are both rejected; this is the 90% interval lying inside the margin. A difference that is not
significant proves no equivalence.

Source: D. Schuirmann, "A Comparison of the Two One-Sided Tests Procedure and the Power Approach"
(1987); J. Shaffer, "Modified Sequentially Rejective Multiple Test Procedures" (1986).
"""

import math
from collections.abc import Sequence
from typing import Literal

from klinic.lab.ablation.intervals import CONFIDENCE, Difference, student_p_value

Decision = Literal["better", "worse", "equivalent", "undecided"]


def outside_margin_p_value(difference: Difference, margin: float) -> float:
    """Return the p-value of the hypothesis that the difference is at least the margin either way.

    >>> from klinic.lab.ablation.intervals import paired_difference
    >>> near = paired_difference([0.501, 0.702, 0.600], [0.5, 0.7, 0.6])
    >>> round(outside_margin_p_value(near, 0.01), 4), round(outside_margin_p_value(near, 0.001), 4)
    (0.002, 0.5)
    """
    if difference.num < 2:
        return math.nan
    if difference.standard_error <= 0:
        return 1.0  # without a spread nothing is known about the next seed
    distances = (margin - difference.mean, margin + difference.mean)
    return max(_one_sided_p_value(d / difference.standard_error, difference) for d in distances)


def correct_jointly(tests: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return corrected p-values so that any false rejection among all has at most 5%.

    Each item holds the tests of one comparison, whose hypotheses exclude one another (a difference
    of 0, and one outside the margin): at most one of an item is true. So p-values are multiplied,
    in rising order, by the number of comparisons that have a hypothesis left (Shaffer's second
    procedure). With one test an item this is Holm's correction.

    >>> correct_jointly([[0.01], [0.04], [0.03]])
    [[0.03], [0.06], [0.06]]
    >>> correct_jointly([[0.01, 0.9], [0.6, 0.02]])
    [[0.02, 1.0], [1.0, 0.04]]
    """
    corrected = [[math.nan] * len(item) for item in tests]
    num_left = [len(item) for item in tests]
    order = sorted((p, i, j) for i, item in enumerate(tests) for j, p in enumerate(item))
    largest = 0.0
    for p_value, i, j in order:
        largest = max(largest, min(1.0, sum(num > 0 for num in num_left) * p_value))
        corrected[i][j] = largest
        num_left[i] -= 1
    return corrected


def decide(difference: Difference, *, higher_is_better: bool = True) -> Decision:
    """Decide by the corrected tests; a significant difference within the margin is equivalence."""
    if difference.p_outside_corrected < 1 - CONFIDENCE:
        return "equivalent"
    if not difference.is_significant:
        return "undecided"
    return "better" if (difference.mean > 0) == higher_is_better else "worse"


def _one_sided_p_value(statistic: float, difference: Difference) -> float:
    half = student_p_value(statistic, difference.num - 1) / 2
    return half if statistic > 0 else 1 - half
