"""Selects the completion of a step by rewards, advantages, and completions that are equal."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from klinic.checks.base import Case
from klinic.checks.measures import equal_completions
from klinic.evidence.record import StepRecord
from klinic.report.evidence_row import (
    EvidenceRow,
    count_by_row,
    flagged_positions,
    row_with_most,
)
from klinic.report.short_number import short_number

MAX_SUM_FRACTION = 0.01  # of a group's absolute advantages, as in the check of groups
RELATIVE_ROUNDING = 1e-3  # of a row's largest advantage per token


def largest_advantage(case: Case) -> EvidenceRow | None:
    """Select the row with the largest absolute advantage."""
    record = case.record
    if record.advantage is None:
        return None
    sizes = np.abs(_finite_or_zero(record.advantage))
    if not sizes.size or not sizes.max() > 0:
        return None
    row = int(np.argmax(sizes))
    reason = f"its advantage of {short_number(record.advantage[row])} is the largest of the step"
    return EvidenceRow(row=row, reason=f"{reason} in size")


def unbalanced_group(case: Case) -> EvidenceRow | None:
    """Select the largest advantage of the group whose advantages are furthest from a sum of 0."""
    record = case.record
    if record.advantage is None or not record.num_rows:
        return None
    advantage, groups = _finite_or_zero(record.advantage), _group_numbers(record)
    sums = np.bincount(groups, advantage)
    sizes = np.bincount(groups, np.abs(advantage))
    fractions = np.abs(sums) / np.maximum(sizes, 1e-12)
    group = int(np.argmax(fractions))
    if not fractions[group] > MAX_SUM_FRACTION:
        return None
    rows = np.flatnonzero(groups == group)
    row = int(rows[np.argmax(np.abs(advantage[rows]))])
    reason = f"the advantages of its group of {rows.size} sum to {short_number(sums[group])}, not 0"
    return EvidenceRow(row=row, reason=reason)


def opposed_advantage(case: Case) -> EvidenceRow | None:
    """Select the row whose advantage opposes its reward most."""
    record = case.record
    if record.advantage is None or record.reward is None or not record.num_rows:
        return None
    reward, advantage = _finite_or_zero(record.reward), _finite_or_zero(record.advantage)
    groups = _group_numbers(record)
    means = (np.bincount(groups, reward) / np.bincount(groups))[groups]
    opposed = -(reward - means) * advantage
    row = int(np.argmax(opposed))
    if not opposed[row] > 0:
        return None
    side = "above" if advantage[row] < 0 else "below"
    return EvidenceRow(
        row=row,
        reason=f"its reward of {short_number(reward[row])} is {side} the mean of its group, "
        f"{short_number(means[row])}, and its advantage is "
        f"{short_number(advantage[row])}",
    )


def bare_tokens(case: Case) -> EvidenceRow | None:
    """Select the row with the most trained tokens without an advantage, of those that have one."""
    record = case.record
    if record.token_advantage is None:
        return None
    sizes = np.abs(_finite_or_zero(record.token_advantage))
    lengths = np.diff(record.row_offsets)
    largest = np.array([sizes[a:b].max(initial=0.0) for a, b in pairwise(record.row_offsets)])
    limit = np.repeat(largest, lengths)
    wrong = record.loss_mask & (limit > 0) & (sizes <= RELATIVE_ROUNDING * limit)
    row = row_with_most(record, wrong)
    if row is None:
        return None
    num, trained = (int(count_by_row(record, f)[row]) for f in (wrong, record.loss_mask))
    return EvidenceRow(
        row=row,
        reason=f"the advantage of {num} of its {trained} trained tokens is 0",
        tokens=flagged_positions(record, row, wrong),
    )


def unequal_twins(case: Case) -> EvidenceRow | None:
    """Select two equal completions of one prompt whose rewards differ most."""
    record = case.record
    if record.reward is None:
        return None
    best: tuple[float, int, int] = (0.0, 0, 0)
    for rows in _equal_completions(record):
        rewards = record.reward[rows]
        if np.isfinite(rewards).all():
            low, high = int(np.argmin(rewards)), int(np.argmax(rewards))
            best = max(best, (float(rewards[high] - rewards[low]), rows[high], rows[low]))
    difference, row, twin = best
    if not difference > 0:
        return None
    return EvidenceRow(
        row=row,
        twin=twin,
        reason=f"completion {twin} has the same prompt and the same tokens; this one got the "
        f"reward {short_number(record.reward[row])}, that one {short_number(record.reward[twin])}",
    )


def equal_twins(case: Case) -> EvidenceRow | None:
    """Select the longest completion that another one of its prompt repeats."""
    record = case.record
    lengths = np.diff(record.row_offsets)
    rows = max(_equal_completions(record), key=lambda rows: int(lengths[rows[0]]), default=None)
    if rows is None:
        return None
    return EvidenceRow(
        row=rows[0],
        twin=rows[1],
        reason=f"{len(rows)} completions of its prompt have the same {lengths[rows[0]]} tokens",
    )


def without_reward(case: Case) -> EvidenceRow | None:
    """Select the first row whose reward is infinite or missing."""
    record = case.record
    if record.reward is None or bool(np.isfinite(record.reward).all()):
        return None
    infinite = np.isinf(record.reward)
    if infinite.any():
        return EvidenceRow(row=int(np.argmax(infinite)), reason="its reward is infinite")
    return EvidenceRow(row=int(np.argmax(np.isnan(record.reward))), reason="it has no reward")


def equal_group(case: Case) -> EvidenceRow | None:
    """Select a row of the group with the most different completions and one reward."""
    record = case.record
    if record.reward is None:
        return None
    best: tuple[int, int] = (1, 0)
    sizes = {}
    for rows in _rows_by_group(record):
        if len(rows) > 1 and bool((record.reward[rows] == record.reward[rows[0]]).all()):
            num = len({_token_bytes(record, row) for row in rows})
            best = max(best, (num, -rows[0]))
            sizes[rows[0]] = len(rows)
    num_different, row = best[0], -best[1]
    if num_different < 2:
        return None
    return EvidenceRow(
        row=row,
        reason=f"all {sizes[row]} completions of its prompt, {num_different} of them different, "
        f"got the reward {short_number(record.reward[row])}",
    )


def lowest_reward(case: Case) -> EvidenceRow | None:
    """Select the first row with the lowest reward."""
    return _extreme_reward(case.record, sign=-1, word="lowest")


def highest_reward(case: Case) -> EvidenceRow | None:
    """Select the first row with the highest reward."""
    return _extreme_reward(case.record, sign=1, word="highest")


def _extreme_reward(record: StepRecord, *, sign: int, word: str) -> EvidenceRow | None:
    if record.reward is None or not np.isfinite(record.reward).any():
        return None
    row = int(np.nanargmax(np.where(np.isfinite(record.reward), sign * record.reward, np.nan)))
    reward = record.reward[row]
    num = int((record.reward == reward).sum())
    return EvidenceRow(
        row=row,
        reason=f"its reward of {short_number(reward)} is the {word} of the step, which "
        f"{num} of {record.num_rows} completions have",
    )


def _equal_completions(record: StepRecord) -> Iterable[list[int]]:
    """Return the rows of each completion that occurs several times for one prompt."""
    return (rows for rows in equal_completions(record) if len(rows) > 1)


def _rows_by_group(record: StepRecord) -> Iterable[list[int]]:
    rows: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(record.group.tolist()):
        rows[group].append(row)
    return rows.values()


def _token_bytes(record: StepRecord, row: int) -> bytes:
    return record.token_ids[record.row_offsets[row] : record.row_offsets[row + 1]].tobytes()


def _group_numbers(record: StepRecord) -> Int[np.ndarray, "B"]:
    """Return the groups numbered from 0, since recorded ones may be any integers."""
    return np.asarray(np.unique(record.group, return_inverse=True)[1])


def _finite_or_zero(values: np.ndarray) -> Float[np.ndarray, "K"]:
    some = np.asarray(values, np.float64)
    return np.where(np.isfinite(some), some, 0.0)
