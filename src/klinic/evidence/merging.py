"""Sums, maxima and order statistics of numbers that several processes hold.

Every process makes the same calls, and gets the same results. Order statistics are exact, not
sketches: the bits of the wanted value are found from the highest to the lowest, by counting in
every round the values that begin with the bits known so far. Only counts are exchanged.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64, Shaped

DIGIT_BITS = 8
"""Bits found in a round: eight rounds of 256 counts for each wanted value."""
NUM_DIGITS = 1 << DIGIT_BITS
SIGN_BIT = np.uint64(1 << 63)


@runtime_checkable
class Merge(Protocol):
    """The processes that hold the rows of a step, seen from one of them."""

    size: int

    def sum(self, values: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
        """Return the sum over all processes, for each entry."""

    def max(self, values: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """Return the largest of all processes, for each entry."""


class OneProcess:
    """A single process, which holds all rows."""

    size = 1

    def sum(self, values: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
        """Return the values."""
        return values

    def max(self, values: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """Return the values."""
        return values


ONE_PROCESS = OneProcess()


def largest_of_all(
    columns: Sequence[Float64[np.ndarray, "_"]], ranks: Sequence[int], merge: Merge
) -> Float64[np.ndarray, "C"]:
    """Return from each column its largest, second largest, ... value over all processes.

    `ranks` are counted from 1, and the processes together have that many values. There is no NaN.

    >>> largest_of_all([np.array([3.0, -1.0, 2.0])], [2], ONE_PROCESS)
    array([2.])
    """
    left = [_ordered_bits(column) for column in columns]
    missing = np.array(ranks, np.int64)
    known = np.zeros(len(columns), np.uint64)
    shift = 64
    while shift:
        bits = min(DIGIT_BITS, shift)
        shift -= bits
        digits = [(keys >> np.uint64(shift)) & np.uint64((1 << bits) - 1) for keys in left]
        counts = merge.sum(_count_digits(digits))
        from_top = np.cumsum(counts[:, ::-1], axis=1)
        chosen = NUM_DIGITS - 1 - (from_top < missing[:, None]).sum(axis=1)
        for column, digit in enumerate(chosen):
            missing[column] -= counts[column, digit + 1 :].sum()
            left[column] = left[column][digits[column] == np.uint64(digit)]
        known |= chosen.astype(np.uint64) << np.uint64(shift)
    return _from_ordered_bits(known)


def _count_digits(columns: Sequence[np.ndarray]) -> Int64[np.ndarray, "C D"]:
    counts = [np.bincount(column.astype(np.int64), minlength=NUM_DIGITS) for column in columns]
    return np.array(counts, np.int64).reshape(len(columns), NUM_DIGITS)


def _ordered_bits(values: Float64[np.ndarray, "K"]) -> np.ndarray:
    """Return the bits of floats, changed so that larger floats have larger bits."""
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64)
    return np.where(bits & SIGN_BIT, ~bits, bits | SIGN_BIT)


def _from_ordered_bits(keys: np.ndarray) -> Float64[np.ndarray, "K"]:
    """Return the floats of `_ordered_bits`."""
    return np.where(keys & SIGN_BIT, keys ^ SIGN_BIT, ~keys).view(np.float64)
