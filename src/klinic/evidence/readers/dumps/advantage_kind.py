"""Identifies the advantage estimator of a dump from its rewards and advantages.

No dump names its estimator. One is named if it gives the recorded advantages, to 1%, in four of
five groups whose rewards differ; the other groups are then the anomaly.
"""

from collections.abc import Callable

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.maths import advantage as estimators

MIN_GROUPS = 4
MIN_FRACTION = 0.8
TOLERANCE = 0.01  # relative; epsilons in a divisor change less
CANDIDATES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "group_mean": estimators.group_mean,
    "leave_one_out": estimators.leave_one_out,
    "group_std": estimators.group_std,
    "batch": estimators.batch,
}


def identify_advantage(record: StepRecord) -> str | None:
    """Return the estimator that fits most groups of a record, or None."""
    if record.reward is None or record.advantage is None:
        return None
    used = np.isfinite(record.reward) & np.isfinite(record.advantage)
    reward, wanted, group = record.reward[used], record.advantage[used], record.group[used]
    rows_of_group = [np.flatnonzero(group == g) for g in np.unique(group)]
    informative = [rows for rows in rows_of_group if len(rows) > 1 and np.ptp(reward[rows]) > 0]
    if len(informative) < MIN_GROUPS:
        return None
    fractions = {
        name: _fitting_fraction(name, estimate(reward, group), wanted, informative)
        for name, estimate in CANDIDATES.items()
    }
    best = max(fractions, key=lambda name: fractions[name])
    return best if fractions[best] >= MIN_FRACTION else None


def _fitting_fraction(
    name: str, expected: np.ndarray, wanted: np.ndarray, groups: list[np.ndarray]
) -> float:
    """Return the fraction of groups whose advantages are those expected."""
    return float(np.mean([_fits_group(name, expected[rows], wanted[rows]) for rows in groups]))


def _fits_group(name: str, expected: np.ndarray, wanted: np.ndarray) -> bool:
    if _are_close(expected, wanted):
        return True
    # trainers divide the squared deviations of a group by n or by n - 1
    num = len(expected)
    return name == "group_std" and _are_close(expected * np.sqrt((num - 1) / num), wanted)


def _are_close(expected: np.ndarray, wanted: np.ndarray) -> bool:
    return float(np.abs(expected - wanted).max()) <= TOLERANCE * float(np.abs(expected).max())
