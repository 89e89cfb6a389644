"""Measurements on a record that several checks share; the formulas themselves are in `maths`.

Float64 columns, masks, gaps and row numbers of the most recent records are cached. The cached
arrays are read-only.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.checks.base import Case, Finding, no_data_finding, passed_finding
from klinic.evidence.record import StepRecord
from klinic.maths.arrays import row_of_token, segment_sum

CACHE_SIZE = 12  # cached arrays of each kind: those of two or three records


def as_float64(values: np.ndarray | None) -> Float[np.ndarray, "N"]:
    """Return a column, which must be present, in float64."""
    assert values is not None  # noqa: S101 - guaranteed by `Check.needs`
    return np.asarray(values, dtype=np.float64)


def float64_column(record: StepRecord, name: str) -> Float[np.ndarray, "N"]:
    """Return a column of a record, which must be present, in float64."""
    return np.asarray(_cached_column(record, name))


def finite_tokens(record: StepRecord, name: str) -> Bool[np.ndarray, "N"]:
    """Return a mask of the tokens, trained or not, at which a column is finite."""
    return np.asarray(_cached_finite(record, name))


def finite_trained_tokens(record: StepRecord, *columns: str) -> Bool[np.ndarray, "N"]:
    """Return a mask of the trained tokens at which all the columns are finite."""
    return np.asarray(_cached_finite_trained(record, tuple(sorted(columns))))


def column_difference(record: StepRecord, one: str, other: str) -> Float[np.ndarray, "N"]:
    """Return the difference of two columns on all tokens."""
    return np.asarray(_cached_difference(record, one, other))


def logp_gap(record: StepRecord, one: str, other: str) -> Float[np.ndarray, "K"]:
    """Return the difference of two columns on the trained tokens at which both are finite."""
    return np.asarray(_cached_gap(record, one, other))


def rms_logp_gap(record: StepRecord, one: str, other: str) -> float:
    """Return the root mean square of `logp_gap`; 0 without tokens."""
    return float(_cached_rms_gap(record, one, other))


def row_numbers(record: StepRecord) -> Int[np.ndarray, "N"]:
    """Return the row index of every token."""
    return np.asarray(_cached_row_numbers(record))


def _read_only_view(values: Any) -> np.ndarray:
    view: np.ndarray = values.view()  # a view: the record's own array stays writable
    view.flags.writeable = False
    return view


@lru_cache(maxsize=CACHE_SIZE)
def _cached_column(record: StepRecord, name: str) -> np.ndarray:
    return _read_only_view(as_float64(getattr(record, name)))


@lru_cache(maxsize=CACHE_SIZE)
def _cached_finite(record: StepRecord, name: str) -> np.ndarray:
    return _read_only_view(np.isfinite(_cached_column(record, name)))


@lru_cache(maxsize=CACHE_SIZE)
def _cached_finite_trained(record: StepRecord, columns: tuple[str, ...]) -> np.ndarray:
    mask: np.ndarray = np.array(record.loss_mask)
    for name in columns:
        mask &= _cached_finite(record, name)
    return _read_only_view(mask)


@lru_cache(maxsize=CACHE_SIZE)
def _cached_difference(record: StepRecord, one: str, other: str) -> np.ndarray:
    return _read_only_view(_cached_column(record, one) - _cached_column(record, other))


@lru_cache(maxsize=CACHE_SIZE)
def _cached_gap(record: StepRecord, one: str, other: str) -> np.ndarray:
    return _read_only_view(
        _cached_difference(record, one, other)[finite_trained_tokens(record, one, other)]
    )


@lru_cache(maxsize=CACHE_SIZE)
def _cached_rms_gap(record: StepRecord, one: str, other: str) -> float:
    return rms(_cached_gap(record, one, other))


@lru_cache(maxsize=CACHE_SIZE)
def _cached_row_numbers(record: StepRecord) -> np.ndarray:
    return _read_only_view(row_of_token(record.row_offsets))


def has_older_samples(record: StepRecord) -> bool:
    """Return whether trained tokens were sampled with older weights than the learner's.

    The gap between sampler and learner is then that of two policies, whatever else is wrong.
    """
    version = record.facts.get("learner_version")
    if record.weight_version is None or version is None or not record.loss_mask.any():
        return False
    return bool((record.weight_version[record.loss_mask] < int(version)).any())


OLDER_SAMPLES = "the tokens were sampled with older weights, as recorded, which leaves a gap"


def rms(values: np.ndarray) -> float:
    """Return the root mean square; 0 for an empty array."""
    return float(np.sqrt(mean(np.square(values)))) if values.size else 0.0


def mean(values: np.ndarray) -> float:
    """Return `values.mean()`, bit for bit, in a fraction of its time.

    >>> mean(np.array([1.0, 2.0, 6.0]))
    3.0
    """
    return float(np.add.reduce(values) / values.size)


def fraction_true(flags: np.ndarray) -> float:
    """Return the mean of booleans as `ndarray.mean` does, bit for bit, in a fraction of its time.

    >>> fraction_true(np.array([True, False, False, False]))
    0.25
    """
    return float(np.count_nonzero(flags) / flags.size)


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


def tokens_per_row(record: StepRecord, mask: Bool[np.ndarray, "N"]) -> Float[np.ndarray, "B"]:
    """Return the number of masked tokens of each row."""
    counts: np.ndarray = segment_sum(mask.astype(np.float64), row_numbers(record), record.num_rows)
    return counts


def prompts_of_rows(record: StepRecord) -> list[bytes] | None:
    """Return the prompt of each row as bytes that are equal for equal ids; None without prompts."""
    if record.prompt_ids is None or record.prompt_offsets is None:
        return None
    ids = np.ascontiguousarray(record.prompt_ids, np.int64)
    return [ids[start:end].tobytes() for start, end in pairwise(record.prompt_offsets.tolist())]


def row_means(
    record: StepRecord, values: Float[np.ndarray, "N"], mask: Bool[np.ndarray, "N"]
) -> Float[np.ndarray, "B"]:
    """Return the mean over the masked tokens of each row; NaN for a row without any."""
    count = tokens_per_row(record, mask)
    total = segment_sum(np.where(mask, values, 0.0), row_numbers(record), record.num_rows)
    nan_rows = np.full(record.num_rows, np.nan)
    means: np.ndarray = np.divide(total, count, out=nan_rows, where=count > 0)
    return means


@lru_cache(maxsize=CACHE_SIZE)
def _cached_row_gaps(record: StepRecord, one: str, other: str) -> np.ndarray:
    abs_gap = np.abs(_cached_difference(record, one, other))
    return _read_only_view(row_means(record, abs_gap, finite_trained_tokens(record, one, other)))


def row_logp_gaps(record: StepRecord, one: str, other: str) -> Float[np.ndarray, "B"]:
    """Return the mean absolute gap of each row; NaN if no trained token has both log-probs."""
    return np.asarray(_cached_row_gaps(record, one, other))


@lru_cache(maxsize=CACHE_SIZE)
def equal_completions(record: StepRecord) -> list[list[int]]:
    """Return row indices grouped by completion: equal completions of one prompt share a list."""
    rows_by_completion: dict[tuple[int, bytes], list[int]] = {}
    ends = record.row_offsets.tolist()
    for row, (group, span) in enumerate(zip(record.group.tolist(), pairwise(ends), strict=True)):
        rows_by_completion.setdefault((group, record.token_ids[slice(*span)].tobytes()), []).append(
            row
        )
    return list(rows_by_completion.values())


def num_equal_pairs(equal: list[list[int]]) -> int:
    """Return the number of pairs of equal completions."""
    return sum(num_pairs(len(rows)) for rows in equal)


def num_pairs(num: int) -> int:
    """Return the number of unordered pairs of `num` items.

    >>> [num_pairs(num) for num in range(5)]
    [0, 0, 1, 3, 6]
    """
    return num * (num - 1) // 2


@lru_cache(maxsize=CACHE_SIZE)
def finite_group_rewards(record: StepRecord) -> tuple[np.ndarray, ...]:
    """Return the finite rewards of each group."""
    reward = as_float64(record.reward)
    order = np.argsort(record.group, kind="stable")
    ends = np.flatnonzero(np.diff(record.group[order])) + 1
    groups = np.split(reward[order], ends)
    if np.isfinite(reward).all():
        return tuple(groups)
    return tuple(group[np.isfinite(group)] for group in groups)


@lru_cache(maxsize=CACHE_SIZE)
def rows_of_whole_groups(record: StepRecord, group_size: int | None) -> Bool[np.ndarray, "B"]:
    """Return a mask of the rows whose group has all of its completions in the step.

    A loop may drop rows, or train on a group in several steps. If the size is unknown, the most
    frequent one counts as whole; of equally frequent ones the largest.
    """
    _, number, sizes = np.unique(record.group, return_inverse=True, return_counts=True)
    if group_size is None and sizes.size:
        counts = np.bincount(sizes)
        group_size = len(counts) - 1 - int(np.argmax(counts[::-1]))
    return _read_only_view((sizes >= (group_size or 1))[number])


def whole_groups(case: Case, record: StepRecord) -> Bool[np.ndarray, "B"]:
    """Return the mask of `rows_of_whole_groups` for the group size in run.json."""
    size = case.run.get("group_size")
    return np.asarray(rows_of_whole_groups(record, size if isinstance(size, int) else None))


def no_whole_group_finding(case: Case) -> Finding:
    """Return the finding of a step in which every group lacks completions."""
    return no_data_finding(
        f"no group has all of its {case.run.get('group_size')} completions in this step"
    )


def mean_reward(record: StepRecord) -> tuple[float, float] | None:
    """Return the mean reward and its standard error over groups; None for fewer than two."""
    if record.reward is None:
        return None
    means = np.array([mean(rewards) for rewards in finite_group_rewards(record) if rewards.size])
    if len(means) < 2:
        return None
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


def trains_on_teacher_alone(case: Case) -> bool:
    """Whether the KL to a teacher replaces the rewards in the loss of a run."""
    teacher = case.run.get("teacher")
    return isinstance(teacher, Mapping) and teacher.get("alone") is True


def rule_out_without_kl(case: Case) -> Finding | None:
    """Rule out causes of the KL term if the run has none."""
    coefficients = [record.facts.get("kl_coef") for record in case.recent_records]
    has_kl_term = case.run.get("estimator") is not None or any(c != 0 for c in coefficients)
    return None if has_kl_term else passed_finding("the loss has no KL term: its coefficient is 0")
