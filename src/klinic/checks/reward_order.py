"""The order in which rewards would fit their completions, if they do not as recorded.

Equal completions of one prompt have equal rewards. Where they do not, and do after the rewards are
put in another order or taken from a neighbouring step, that order is the fault.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from klinic.checks.base import Case
from klinic.checks.reward_evidence import (
    RewardStatistics,
    concatenate_statistics,
    measure_noise,
    recent_statistics,
    reward_statistics,
)
from klinic.evidence.record import StepRecord

MIN_NOISE = 0.1  # of the variance, by three standard errors: a good judge has less
MAX_NOISE = 0.02  # of the variance that another order may leave
MIN_DEVIATING = 10  # completions with another reward than their equals

Orders = dict[str, np.ndarray]


def find_reward_order(case: Case) -> str:
    """Return how rewards were misplaced over the recent steps; empty if they were not."""
    records = [record for record in case.recent_records if record.reward is not None]
    recorded = concatenate_statistics(list(recent_statistics(case)))
    noise = measure_noise(recorded)
    if noise.lower_bound < MIN_NOISE or recorded.deviating.sum() < MIN_DEVIATING:
        return ""
    for description, statistics in _other_orders(records):
        other = measure_noise(statistics)
        # moved rewards may cover fewer steps, so those must be able to show noise too
        if other.fraction < MAX_NOISE and other.repeats > noise.repeats / 2:
            return f"{description}; as recorded, {noise.fraction:.0%} of their variance is noise"
    return ""


def _other_orders(records: list[StepRecord]) -> Iterator[tuple[str, RewardStatistics]]:
    """Yield the rewards of all steps in one other order after another."""
    for lag, when in ((1, "before"), (-1, "after")):
        moved = [
            _with_rewards(here, np.asarray(there.reward))
            for here, there in _neighbours(records, lag)
        ]
        if moved:
            yield f"they fit the completions of the step {when}", concatenate_statistics(moved)
    # every order exists in every step, except for group sizes that do not divide the rows
    names = set.intersection(*(set(_row_orders(record)) for record in records))
    for name in sorted(names):
        moved = [
            _with_rewards(record, np.asarray(record.reward)[_row_orders(record)[name]])
            for record in records
        ]
        yield f"they fit the completions {name}", concatenate_statistics(moved)


def _neighbours(records: list[StepRecord], lag: int) -> list[tuple[StepRecord, StepRecord]]:
    """Return pairs of a step and the step that may hold its rewards."""
    by_step = {record.step: record for record in records}
    pairs = [(record, by_step.get(record.step + lag)) for record in records]
    return [
        (here, there)
        for here, there in pairs
        if there is not None and there.num_rows == here.num_rows
    ]


def _row_orders(record: StepRecord) -> Orders:
    """Return, by description, the row whose reward belongs to each row."""
    num = record.num_rows
    rows, lengths = np.arange(num), np.diff(record.row_offsets)
    orders = {
        "in reverse": rows[::-1],
        "sorted by length, the shortest first": _inverse(np.argsort(lengths, kind="stable")),
        "sorted by length, the longest first": _inverse(np.argsort(-lengths, kind="stable")),
    }
    size = int(np.bincount(record.group).max(initial=1))
    for shift in range(1, min(size, num - 1) + 1):
        orders[f"{shift} rows later"] = np.roll(rows, shift)
        orders[f"{shift} rows earlier"] = np.roll(rows, -shift)
    if num % size == 0 and 1 < size < num:
        table = rows.reshape(-1, size)
        orders["with prompts and samples exchanged"] = table.T.reshape(-1)
        orders["with samples and prompts exchanged"] = _inverse(table.T.reshape(-1))
    return orders


def _inverse(order: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    return inverse


def _with_rewards(record: StepRecord, reward: np.ndarray) -> RewardStatistics:
    return reward_statistics(replace(record, reward=reward))
