"""Rows of a step that an earlier step has too: the same prompt and completion, scored again."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from klinic.checks.measures import float64_column, prompts_of_rows
from klinic.evidence.record import StepRecord

RowKey = tuple[bytes, bytes]
MOST_RECORDS = 32  # of which the rows are remembered: those that a case has


def repeated_difference(
    now: StepRecord, earlier: Sequence[StepRecord], column: str
) -> Float[np.ndarray, "K"]:
    """Return how far a column differs from its first value on the rows that come again.

    Empty if prompts were not recorded or no row comes again.
    """
    known = [record for record in earlier if getattr(record, column) is not None]
    if getattr(now, column) is None or not known:
        return np.zeros(0)
    differences = [np.zeros(0)]
    for key, tokens in _keyed_rows(now):
        first = next((record for record in known if key in _rows_by_key(record)), None)
        if first is not None:
            before = float64_column(first, column)[_rows_by_key(first)[key]]
            differences.append(float64_column(now, column)[tokens] - before)
    gap = np.concatenate(differences)
    return np.asarray(gap[np.isfinite(gap)])


@lru_cache(maxsize=MOST_RECORDS)
def _rows_by_key(record: StepRecord) -> dict[RowKey, slice]:
    """Return the tokens of a row by prompt and completion."""
    return dict(_keyed_rows(record))


def _keyed_rows(record: StepRecord) -> list[tuple[RowKey, slice]]:
    if (prompts := prompts_of_rows(record)) is None:
        return []
    spans = [slice(start, end) for start, end in pairwise(record.row_offsets.tolist())]
    return [
        ((prompt, record.token_ids[span].tobytes()), span)
        for prompt, span in zip(prompts, spans, strict=True)
    ]
