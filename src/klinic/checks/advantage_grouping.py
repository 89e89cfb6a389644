"""Which rows' rewards explain the advantages of a step: candidate groupings compete.

An advantage is a positive multiple of a reward less the mean of its group. Each candidate says
which rows form a group, and which row's reward belongs to which. One explains the advantages if
nearly all rows have its shape, most do not have that of their own group, and no chance would do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from klinic.checks.measures import prompts_of_rows
from klinic.evidence.record import StepRecord

TOLERANCE = 0.01  # of the root mean square of a group's advantages
MIN_EXPLAINED = 0.95  # of the rows
MAX_OWN = 0.5  # of the rows have the shape of their own group
MIN_LOG_ORDERS = math.log(1e5)  # of the orders in which the rewards could have come
MOST_SHIFTS = 64
WHOLE_BATCH = "the whole batch, not of their groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups of rows, and the reward of each row, that explain the advantages."""

    rows: str
    """Whose rewards they are, for people."""
    fraction: float
    """Fraction of the rows that it explains."""

    @property
    def is_whole_batch(self) -> bool:
        """Whether all rows form one group."""
        return self.rows == WHOLE_BATCH


def explain_advantages(record: StepRecord) -> Grouping | None:
    """Return the grouping of other rows that explains the advantages, or None."""
    if record.reward is None or record.advantage is None or not record.num_rows:
        return None
    advantage, reward = (np.asarray(c, np.float64) for c in (record.advantage, record.reward))
    if not (np.isfinite(advantage).all() and np.isfinite(reward).all()):
        return None
    if _fraction_of_shape(advantage, reward, record.group) > MAX_OWN:
        return None
    for rows, group, order in _candidates(record):
        fraction = _fraction_of_shape(advantage, reward[order], group)
        if fraction >= MIN_EXPLAINED and _log_orders(reward[order], group) >= MIN_LOG_ORDERS:
            return Grouping(rows=rows, fraction=fraction)
    return None


Candidate = tuple[str, np.ndarray, np.ndarray]


def _candidates(record: StepRecord) -> Iterator[Candidate]:
    """Yield (whose rewards, group of each row, row whose reward it has)."""
    num, group = record.num_rows, np.asarray(record.group)
    index = np.arange(num)
    yield WHOLE_BATCH, np.zeros(num, np.int64), index
    if (prompts := prompts_of_rows(record)) is not None:
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        yield "rows with the same prompt", np.array([numbers[p] for p in prompts]), index
    sizes = np.unique(np.unique(group, return_counts=True)[1])
    if len(sizes) == 1 and sizes[0] > 1:
        size = int(sizes[0])
        yield f"{size} consecutive rows", index // size, index
        yield f"every {num // size}th row", index % (num // size), index
    for shift in range(1, min(num, MOST_SHIFTS)):
        other = (index + shift) % num
        yield f"rows {shift} places on, with their groups", group[other], other
        yield f"rows {shift} places on", group, other


def _fraction_of_shape(advantage: np.ndarray, reward: np.ndarray, group: np.ndarray) -> float:
    """Return the fraction of rows whose group's advantages are a multiple of centred rewards."""
    _, number, sizes = np.unique(group, return_inverse=True, return_counts=True)

    def group_sum(values: np.ndarray) -> np.ndarray:
        return np.bincount(number, values, len(sizes))

    centred = reward - (group_sum(reward) / sizes)[number]
    tiny = 1e-9 * max(float(np.abs(reward).max()), 1e-12)
    spread, size = np.sqrt(group_sum(centred**2) / sizes), np.sqrt(group_sum(advantage**2) / sizes)
    largest = max(float(size.max()), 1e-12)
    has_spread = spread > tiny
    expected = np.where(has_spread[number], centred / np.where(has_spread, spread, 1.0)[number], 0)
    actual = advantage / np.where(has_spread, np.maximum(size, 1e-12), largest)[number]
    misfit = np.sqrt(group_sum((actual - expected) ** 2) / sizes)
    return float((misfit <= TOLERANCE)[number].mean())


def _log_orders(reward: np.ndarray, group: np.ndarray) -> float:
    """Return the log of the number of different orders of the rewards within their groups."""
    total = 0.0
    for number in np.unique(group):
        counts = np.unique(np.round(reward[group == number], 6), return_counts=True)[1]
        total += math.lgamma(counts.sum() + 1) - sum(math.lgamma(int(n) + 1) for n in counts)
    return total
