"""Measurements on a record that several checks share; the formulas themselves are in `maths`.

Float64 columns, masks, gaps and row numbers of the most recent records are cached. The cached
arrays are read-only.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.checks.base import Case, Finding, passed
from klinic.evidence.record import StepRecord
from klinic.maths.arrays import row_of_token, segment_sum

SHARED = 12  # cached arrays of each kind: those of two or three records


def wide(values: np.ndarray | None) -> Float[np.ndarray, "N"]:
    """Return a column, which must be present, in float64."""
    assert values is not None  # noqa: S101 - guaranteed by `Check.needs`
    return np.asarray(values, dtype=np.float64)


def column(record: StepRecord, name: str) -> Float[np.ndarray, "N"]:
    """Return a column of a record, which must be present, in float64."""
    return np.asarray(_column(record, name))


def finite_tokens(record: StepRecord, name: str) -> Bool[np.ndarray, "N"]:
    """Return a mask of the tokens, trained or not, at which a column is finite."""
    return np.asarray(_finite(record, name))


def known_tokens(record: StepRecord, *columns: str) -> Bool[np.ndarray, "N"]:
    """Return a mask of the trained tokens at which all the columns are finite."""
    return np.asarray(_known(record, tuple(sorted(columns))))


def difference(record: StepRecord, one: str, other: str) -> Float[np.ndarray, "N"]:
    """Return the difference of two columns on all tokens."""
    return np.asarray(_difference(record, one, other))


def gap(record: StepRecord, one: str, other: str) -> Float[np.ndarray, "K"]:
    """Return the difference of two columns on the trained tokens at which both are finite."""
    return np.asarray(_gap(record, one, other))


def rms_gap(record: StepRecord, one: str, other: str) -> float:
    """Return the root mean square of `logp_gap`; 0 without tokens."""
    return float(_rms_gap(record, one, other))


def row_numbers(record: StepRecord) -> Int[np.ndarray, "N"]:
    """Return the row index of every token."""
    return np.asarray(_row_numbers(record))


def _read_only(values: Any) -> np.ndarray:
    shown: np.ndarray = values.view()  # a view: the record's own array stays writable
    shown.flags.writeable = False
    return shown


@lru_cache(maxsize=SHARED)
def _column(record: StepRecord, name: str) -> np.ndarray:
    return _read_only(wide(getattr(record, name)))


@lru_cache(maxsize=SHARED)
def _finite(record: StepRecord, name: str) -> np.ndarray:
    return _read_only(np.isfinite(_column(record, name)))


@lru_cache(maxsize=SHARED)
def _known(record: StepRecord, columns: tuple[str, ...]) -> np.ndarray:
    known: np.ndarray = np.array(record.loss_mask)
    for name in columns:
        known &= _finite(record, name)
    return _read_only(known)


@lru_cache(maxsize=SHARED)
def _difference(record: StepRecord, one: str, other: str) -> np.ndarray:
    return _read_only(_column(record, one) - _column(record, other))


@lru_cache(maxsize=SHARED)
def _gap(record: StepRecord, one: str, other: str) -> np.ndarray:
    return _read_only(_difference(record, one, other)[known_tokens(record, one, other)])


@lru_cache(maxsize=SHARED)
def _rms_gap(record: StepRecord, one: str, other: str) -> float:
    return rms(_gap(record, one, other))


@lru_cache(maxsize=SHARED)
def _row_numbers(record: StepRecord) -> np.ndarray:
    return _read_only(row_of_token(record.row_offsets))


def rms(values: np.ndarray) -> float:
    """Return the root mean square; 0 for an empty array."""
    return float(np.sqrt(mean(np.square(values)))) if values.size else 0.0


def mean(values: np.ndarray) -> float:
    """Return `values.mean()`, bit for bit, in a fraction of its time.

    >>> mean(np.array([1.0, 2.0, 6.0]))
    3.0
    """
    return float(np.add.reduce(values) / values.size)


def fraction(where: np.ndarray) -> float:
    """Return the mean of booleans as `ndarray.mean` does, bit for bit, in a fraction of its time.

    >>> fraction(np.array([True, False, False, False]))
    0.25
    """
    return float(np.count_nonzero(where) / where.size)


def median(values: Float[np.ndarray, "K"]) -> float:
    """Return `np.median` of finite values, bit for bit, in a fraction of its time.

    >>> median(np.array([4.0, 1.0, 3.0])), median(np.array([4.0, 1.0, 3.0, 2.0]))
    (3.0, 2.5)
    """
    middle = values.size // 2
    if values.size % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1]
    return float((low + high) / 2)


def row_means(
    record: StepRecord, values: Float[np.ndarray, "N"], known: Bool[np.ndarray, "N"]
) -> Float[np.ndarray, "B"]:
    """Return the mean over the masked tokens of each row; NaN for a row without any."""
    rows = row_numbers(record)
    count = segment_sum(known.astype(np.float64), rows, record.num_rows)
    total = segment_sum(np.where(known, values, 0.0), rows, record.num_rows)
    nothing = np.full(record.num_rows, np.nan)
    means: np.ndarray = np.divide(total, count, out=nothing, where=count > 0)
    return means


@lru_cache(maxsize=SHARED)
def _row_gaps(record: StepRecord, one: str, other: str) -> np.ndarray:
    apart = np.abs(_difference(record, one, other))
    return _read_only(row_means(record, apart, known_tokens(record, one, other)))


def row_gaps(record: StepRecord, one: str, other: str) -> Float[np.ndarray, "B"]:
    """Return the mean absolute gap of each row; NaN if no trained token has both log-probs."""
    return np.asarray(_row_gaps(record, one, other))


def equal_completions(record: StepRecord) -> list[list[int]]:
    """Return row indices grouped by completion: equal completions of one prompt share a list."""
    found: dict[tuple[int, bytes], list[int]] = {}
    ends = record.row_offsets.tolist()
    for row, (group, span) in enumerate(zip(record.group.tolist(), pairwise(ends), strict=True)):
        found.setdefault((group, record.token_ids[slice(*span)].tobytes()), []).append(row)
    return list(found.values())


def num_equal_pairs(equal: list[list[int]]) -> int:
    """Return the number of pairs of equal completions."""
    return sum(num_pairs(len(rows)) for rows in equal)


def num_pairs(num: int) -> int:
    """Return the number of unordered pairs of `num` items.

    >>> [num_pairs(num) for num in range(5)]
    [0, 0, 1, 3, 6]
    """
    return num * (num - 1) // 2


@lru_cache(maxsize=SHARED)
def known_rewards(record: StepRecord) -> tuple[np.ndarray, ...]:
    """Return the finite rewards of each group."""
    reward = wide(record.reward)
    order = np.argsort(record.group, kind="stable")
    ends = np.flatnonzero(np.diff(record.group[order])) + 1
    groups = np.split(reward[order], ends)
    if np.isfinite(reward).all():
        return tuple(groups)
    return tuple(group[np.isfinite(group)] for group in groups)


def mean_reward(record: StepRecord) -> tuple[float, float] | None:
    """Return the mean reward and its standard error over groups; None for fewer than two."""
    if record.reward is None:
        return None
    means = np.array([mean(rewards) for rewards in known_rewards(record) if rewards.size])
    if len(means) < 2:
        return None
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


def no_kl_term(case: Case) -> Finding | None:
    """Rule out causes of the KL term if the run has none."""
    coefficients = [record.facts.get("kl_coef") for record in case.window]
    asked_for = case.run.get("estimator") is not None or any(c != 0 for c in coefficients)
    return None if asked_for else passed("the loss has no KL term: its coefficient is 0")
