"""Selects rows of a record."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS, StepRecord


def first_rows(record: StepRecord, num: int) -> StepRecord:
    """Return a record of the first `num` completions."""
    return record if num >= record.num_rows else some_rows(record, range(num))


def some_rows(record: StepRecord, rows: Sequence[int]) -> StepRecord:
    """Return a record of the completions at these row indices, in this order."""
    picked = np.asarray(rows, dtype=np.int64)
    tokens, offsets = places_of(record.row_offsets, picked)
    cut: dict[str, Any] = {"row_offsets": offsets}
    cut |= {name: _at(record, name, picked) for name in ROW_FIELDS}
    cut |= {name: _at(record, name, tokens) for name in TOKEN_FIELDS}
    cut["reward_parts"] = {name: part[picked] for name, part in record.reward_parts.items()}
    if record.prompt_offsets is not None and record.prompt_ids is not None:
        within, cut["prompt_offsets"] = places_of(record.prompt_offsets, picked)
        cut["prompt_ids"] = record.prompt_ids[within]
    assert cut.keys() <= {field.name for field in fields(record)}  # noqa: S101 - all are columns
    return replace(record, **cut)


def places_of(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows' entries, and the offsets of the rows among them."""
    lengths = np.diff(offsets)[rows]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(offsets.dtype)
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return np.repeat(offsets[:-1][rows], lengths) + within, ends


def _at(record: StepRecord, name: str, places: np.ndarray) -> Any:
    array = getattr(record, name)
    return None if array is None else array[places]
