"""Log-probs of one side that are those of another row, as after one side was sorted or filtered.

A batch is padded to one length, so another row's log-probs are cut or followed by padding: rows are
compared by their first tokens.
"""

from dataclasses import dataclass

import numpy as np

from klinic.checks.measures import float64_column, row_logp_gaps
from klinic.evidence.record import StepRecord

LARGE_ROW_GAP = 0.3  # nats, mean of a row, to the learner's log-probs of the row itself
MAX_MATCHED_GAP = 0.03  # nats, mean, to those of the other row: bf16 against fp32
MAX_MATCHED_FRACTION = 0.1  # of the gap to the row itself
FIRST_TOKENS = 16
MIN_FIRST_TOKENS = 4
MIN_INFORMATION = 2.0  # nats of the compared tokens: certain ones fit any row
MIN_ROWS = 8
MIN_MATCHED = 0.8  # of the rows with a gap
MOST_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """How many rows have the log-probs of another one."""

    with_gap: int
    matched: int


def match_other_rows(record: StepRecord, column: str) -> OtherRows | None:
    """Return the rows of a column that have another row's log-probs; None if few have."""
    if record.logp_old is None or getattr(record, column) is None:
        return None
    gaps = np.nan_to_num(row_logp_gaps(record, "logp_old", column))
    lengths = np.diff(record.row_offsets)
    usable = (gaps > LARGE_ROW_GAP) & (lengths >= MIN_FIRST_TOKENS)
    rows = np.flatnonzero(usable)[:MOST_ROWS]
    if len(rows) < MIN_ROWS:
        return None
    old, other = (_first_tokens(record, name) for name in ("logp_old", column))
    old[lengths < MIN_FIRST_TOKENS] = np.nan
    matched = sum(_has_other_row(row, old, other[row], gaps[row]) for row in rows.tolist())
    if matched < MIN_MATCHED * len(rows):
        return None
    return OtherRows(with_gap=len(rows), matched=matched)


def _first_tokens(record: StepRecord, column: str) -> np.ndarray:
    """Return the first values of each row; NaN behind its end."""
    values = float64_column(record, column)
    index = record.row_offsets[:-1, None] + np.arange(FIRST_TOKENS)
    inside = index < record.row_offsets[1:, None]
    return np.where(inside, values[np.where(inside, index, 0)], np.nan)


def _has_other_row(row: int, old: np.ndarray, other: np.ndarray, gap: float) -> bool:
    """Return whether the values are the old log-probs of a row that is not this one."""
    known = np.isfinite(old) & np.isfinite(other)
    count = known.sum(axis=1)
    distance = np.where(known, np.abs(old - other), 0.0).sum(axis=1) / np.maximum(count, 1)
    information = np.where(known, -old, 0.0).sum(axis=1)
    candidates = (count >= MIN_FIRST_TOKENS) & (information >= MIN_INFORMATION)
    candidates[row] = False
    limit = min(MAX_MATCHED_GAP, MAX_MATCHED_FRACTION * gap)
    return bool((distance[candidates] <= limit).any())
