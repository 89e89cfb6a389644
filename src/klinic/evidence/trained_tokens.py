"""The trained tokens of a record, in blocks of rows that fit into a processor's cache.

A block's columns are reduced to the trained tokens and converted to float64 once.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.evidence.record import StepRecord

BLOCK_TOKENS = 1 << 15
"""Tokens of a block; a longer row is a block of its own."""


class TrainedTokens:
    """Columns at the trained tokens of some rows, in order, as float64; each is made once."""

    def __init__(self, record: StepRecord, rows: slice = slice(None)) -> None:
        num_rows = record.num_rows
        self.rows = slice(*rows.indices(num_rows)[:2])
        offsets = record.row_offsets[self.rows.start : self.rows.stop + 1]
        self._span = slice(int(offsets[0]), int(offsets[-1]))
        places = np.flatnonzero(record.loss_mask[self._span])
        self.num = len(places)
        self._places = None if self.num == self._span.stop - self._span.start else places
        self._offsets = offsets - offsets[0]
        self._values: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._row_offsets: np.ndarray | None = None

    @property
    def row_offsets(self) -> Int[np.ndarray, "offsets"]:
        """Start of each row among the trained tokens, and their number."""
        if self._row_offsets is None:
            places, offsets = self._places, self._offsets
            self._row_offsets = offsets if places is None else np.searchsorted(places, offsets)
        return self._row_offsets

    def select(self, values: np.ndarray) -> Float[np.ndarray, "K"]:
        """Return the values of the trained tokens among those of all tokens, in float64."""
        if id(values) not in self._values:
            trained = values[self._span]
            trained = trained if self._places is None else trained.take(self._places)
            # with the key's array, so that its id is not used again
            self._values[id(values)] = values, np.asarray(trained, dtype=np.float64)
        return self._values[id(values)][1]

    def spread_rows(self, values: Float[np.ndarray, "B"]) -> Float[np.ndarray, "K"]:
        """Return for each trained token the value of its row."""
        spread: np.ndarray = np.repeat(values[self.rows], np.diff(self.row_offsets))
        return spread


def trained_blocks(record: StepRecord) -> Iterator[TrainedTokens]:
    """Yield the trained tokens of consecutive rows, about `BLOCK_TOKENS` tokens at a time."""
    first, offsets = 0, record.row_offsets
    while first < record.num_rows:
        end = int(np.searchsorted(offsets, offsets[first] + BLOCK_TOKENS, side="right")) - 1
        end = max(end, first + 1)
        yield TrainedTokens(record, slice(first, end))
        first = end


def drop_nan(
    values: Float[np.ndarray, "K"], row_offsets: Int[np.ndarray, "offsets"]
) -> tuple[Float[np.ndarray, "L"], Int[np.ndarray, "offsets"]]:
    """Return the values that are not NaN, and the rows' offsets among them.

    >>> drop_nan(np.array([1.0, np.nan, 2.0]), np.array([0, 2, 3]))
    (array([1., 2.]), array([0, 1, 2]))
    """
    is_nan: Bool[np.ndarray, K] = np.isnan(values)
    if not is_nan.any():
        return values, row_offsets
    return values[~is_nan], offsets_among(~is_nan, row_offsets)


def offsets_among(
    mask: Bool[np.ndarray, "K"], row_offsets: Int[np.ndarray, "offsets"]
) -> Int[np.ndarray, "offsets"]:
    """Return the offsets of the rows among the entries inside the mask.

    >>> offsets_among(np.array([True, False, True]), np.array([0, 2, 3]))
    array([0, 1, 2])
    """
    offsets: np.ndarray = np.searchsorted(np.flatnonzero(mask), row_offsets)
    return offsets


def sum_rows(
    values: Float[np.ndarray, "K"], row_offsets: Int[np.ndarray, "offsets"]
) -> Float[np.ndarray, "B"]:
    """Return the sum of each row of concatenated values; rows may be empty.

    >>> sum_rows(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 2, 3]))
    array([3., 0., 4.])
    """
    sums = np.zeros(len(row_offsets) - 1)
    filled = np.diff(row_offsets) > 0
    if filled.any():  # reduceat returns a value, not 0, for an empty row
        sums[filled] = np.add.reduceat(values, row_offsets[:-1][filled])
    return sums
