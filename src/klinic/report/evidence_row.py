"""A completion that shows the evidence of a cause, and how a row of a step is selected for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.checks.base import Case
from klinic.evidence.record import StepRecord
from klinic.maths.arrays import row_of_token, segment_sum

MAX_MARKED = 12  # marked tokens of a completion


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRow:
    """A completion of a step, with what is to be seen in it."""

    row: int
    reason: str
    """What it shows, as a clause."""
    tokens: tuple[int, ...] = ()
    """Positions of the tokens that show it, the first to look at first."""
    twin: int | None = None
    """A second completion of the step to compare it with."""


RowSelector = Callable[[Case], EvidenceRow | None]
"""Selects the completion of a step by one kind of evidence; None if no completion has it."""


def count_by_row(record: StepRecord, flags: Bool[np.ndarray, "N"]) -> Int[np.ndarray, "B"]:
    """Return the number of flagged tokens of every row."""
    rows = row_of_token(record.row_offsets)
    counts = segment_sum(flags.astype(np.float64), rows, record.num_rows)
    return np.asarray(counts).astype(np.int64)


def mean_by_row(record: StepRecord, values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "B"]:
    """Return the mean of the finite values of every row; -inf for a row without any."""
    finite = np.isfinite(values)
    rows = row_of_token(record.row_offsets)
    sums = segment_sum(np.where(finite, values, 0.0), rows, record.num_rows)
    counts = count_by_row(record, finite)
    return np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)


def row_with_most(record: StepRecord, flags: Bool[np.ndarray, "N"]) -> int | None:
    """Return the row with the most flagged tokens; None if there are none."""
    counts = count_by_row(record, flags)
    return int(np.argmax(counts)) if counts.size and counts.max() > 0 else None


def flagged_positions(
    record: StepRecord, row: int, flags: Bool[np.ndarray, "N"]
) -> tuple[int, ...]:
    """Return the positions of the first flagged tokens of a row."""
    part = flags[record.row_offsets[row] : record.row_offsets[row + 1]]
    return tuple(np.flatnonzero(part)[:MAX_MARKED].tolist())


def largest_positions(
    record: StepRecord, row: int, values: Float[np.ndarray, "N"]
) -> tuple[int, ...]:
    """Return the positions of a row's values above half of its largest, the largest first."""
    part = np.nan_to_num(values[record.row_offsets[row] : record.row_offsets[row + 1]])
    order = np.argsort(-part, kind="stable")[:MAX_MARKED]
    return tuple(i for i in order.tolist() if part[i] > 0 and part[i] >= part[order[0]] / 2)


def last_tokens(record: StepRecord) -> Int[np.ndarray, "R"]:
    """Return the index of the last token of every row that has tokens."""
    return np.asarray((record.row_offsets[1:] - 1)[np.diff(record.row_offsets) > 0])


def next_is_same_row(record: StepRecord) -> Bool[np.ndarray, "N"]:
    """Return whether another token of the row follows each token."""
    follows = np.ones(record.num_tokens, dtype=bool)
    follows[last_tokens(record)] = False
    return follows


def be(num: int) -> str:
    """Return the verb of a number of things."""
    return "is" if num == 1 else "are"


def int_fact(run: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of run.json; None if it is none."""
    value = run.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def id_facts(run: Mapping[str, Any], *names: str) -> list[int]:
    """Return the token ids that run.json lists under some names."""
    lists = [run.get(name) for name in names]
    ids = [i for some in lists if isinstance(some, list) for i in some]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and abs(i) < 2**63]
