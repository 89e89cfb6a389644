"""What several checks measure on a record; the formulas themselves are in `maths`."""

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float

from klinic.checks.base import Case, Finding, passed
from klinic.evidence.record import StepRecord
from klinic.maths.arrays import row_of_token, segment_sum


def wide(values: np.ndarray | None) -> Float[np.ndarray, "N"]:
    """Return a column that is there, in float64."""
    assert values is not None  # noqa: S101 - a check names what it needs
    return np.asarray(values, dtype=np.float64)


def known_tokens(record: StepRecord, *columns: str) -> Bool[np.ndarray, "N"]:
    """Return the trained tokens at which all the columns are numbers."""
    known: np.ndarray = np.array(record.loss_mask)
    for name in columns:
        known &= np.isfinite(wide(getattr(record, name)))
    return known


def gap(record: StepRecord, one: str, other: str) -> Float[np.ndarray, "K"]:
    """Return the difference of two columns on the trained tokens that have both."""
    known = known_tokens(record, one, other)
    difference = wide(getattr(record, one)) - wide(getattr(record, other))
    return np.asarray(difference[known])


def rms(values: np.ndarray) -> float:
    """Return the root of the mean square; 0 for nothing."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def row_means(
    record: StepRecord, values: Float[np.ndarray, "N"], known: Bool[np.ndarray, "N"]
) -> Float[np.ndarray, "B"]:
    """Return the mean over the known tokens of each row; NaN where there is none."""
    rows = row_of_token(record.row_offsets)
    count = segment_sum(known.astype(np.float64), rows, record.num_rows)
    total = segment_sum(np.where(known, values, 0.0), rows, record.num_rows)
    nothing = np.full(record.num_rows, np.nan)
    means: np.ndarray = np.divide(total, count, out=nothing, where=count > 0)
    return means


def equal_completions(record: StepRecord) -> list[list[int]]:
    """Return the rows of each completion, those of equal completions of one prompt together."""
    found: dict[tuple[int, bytes], list[int]] = {}
    ends = record.row_offsets.tolist()
    for row, (group, span) in enumerate(zip(record.group.tolist(), pairwise(ends), strict=True)):
        found.setdefault((group, record.token_ids[slice(*span)].tobytes()), []).append(row)
    return list(found.values())


def num_equal_pairs(equal: list[list[int]]) -> int:
    """Return how many pairs of completions are equal."""
    return sum(num_pairs(len(rows)) for rows in equal)


def num_pairs(num: int) -> int:
    """Return how many pairs there are among so many.

    >>> [num_pairs(num) for num in range(5)]
    [0, 0, 1, 3, 6]
    """
    return num * (num - 1) // 2


def known_rewards(record: StepRecord) -> list[np.ndarray]:
    """Return the rewards of each group that are numbers."""
    reward = wide(record.reward)
    order = np.argsort(record.group, kind="stable")
    ends = np.flatnonzero(np.diff(record.group[order])) + 1
    groups = np.split(reward[order], ends)
    if np.isfinite(reward).all():
        return groups
    return [group[np.isfinite(group)] for group in groups]


def mean_reward(record: StepRecord) -> tuple[float, float] | None:
    """Return the mean reward and its standard error over groups; None where there are too few."""
    if record.reward is None:
        return None
    means = np.array([rewards.mean() for rewards in known_rewards(record) if rewards.size])
    if len(means) < 2:
        return None
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


def no_kl_term(case: Case) -> Finding | None:
    """Rule out what only a KL term can have, where none was asked for."""
    coefficients = [record.facts.get("kl_coef") for record in case.window]
    asked_for = case.run.get("estimator") is not None or any(c != 0 for c in coefficients)
    return None if asked_for else passed("the loss has no KL term: its coefficient is 0")
