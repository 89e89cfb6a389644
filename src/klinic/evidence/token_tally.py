"""Means, extremes and tails of a quantity per token, merged over blocks of rows and processes.

Order statistics are exact: they are those of the sorted values, though only the largest are kept.
Sums add in pairs within a block and a row: another division of the same rows differs from them by
less than 1e-12 of the sum of the absolute values.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from klinic.evidence.merging import Merge, largest_of_all
from klinic.evidence.trained_tokens import drop_nan, sum_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDistribution:
    """Moments and tail of the values of some tokens; rows without a value are left out."""

    mean: float
    smallest: float
    largest: float
    quantile: float
    tail_share: float
    """Sum of the largest absolute values over the sum of all."""
    share_above: float
    """Fraction of tokens whose absolute value exceeds a limit."""
    row_mean: float
    row_largest: float
    """Mean and largest of the sums of each row."""


class TokenTally:
    """Sums and largest values of a quantity per token, over blocks of tokens; without its NaN."""

    def __init__(
        self, num_tokens: int, *, quantile: float, tail_fraction: float, limit: float
    ) -> None:
        """Take the largest number of tokens that all processes together may add."""
        self.quantile, self.tail_fraction = quantile, tail_fraction
        self._limit = limit
        self.sums = np.zeros(6)
        """Numbers of tokens, large ones and rows; sums of values, absolute values and rows."""
        self.extremes = np.full(3, -np.inf)
        """The largest value, the negative smallest, the largest sum of a row."""
        self.values = LargestValues(max(1, num_above_quantile(num_tokens, quantile)))
        self.sizes = LargestValues(num_in_tail(num_tokens, tail_fraction))
        if tail_fraction > 1 - quantile:
            raise ValueError("the tail must lie above the quantile")

    def add(self, values: Float[np.ndarray, "K"], row_offsets: Int[np.ndarray, "offsets"]) -> None:
        """Add the values of a block's tokens."""
        values, row_offsets = drop_nan(values, row_offsets)
        if not values.size:
            return
        total, smallest = values.sum(), values.min()
        size = values if smallest >= 0 else np.abs(values)
        row_sums = sum_rows(values, row_offsets)[np.diff(row_offsets) > 0]
        sum_of_sizes = total if size is values else size.sum()
        num_above = np.count_nonzero(size > self._limit)
        counts = [values.size, num_above, row_sums.size]
        self.sums += [*counts, total, sum_of_sizes, row_sums.sum()]
        self.extremes = np.maximum(self.extremes, [values.max(), -smallest, row_sums.max()])
        candidates = self.values.add(values)
        # without a negative value, and with fewer wanted, the others cannot be among the largest
        self.sizes.add(candidates if size is values else size)


class LargestValues:
    """The largest of all values that are added; there must be no NaN."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._kept: list[np.ndarray] = []
        self._num_kept = 0
        self._floor: float | None = None
        """There are `num` values at or above it."""

    def add(self, values: Float[np.ndarray, "K"]) -> Float[np.ndarray, "_"]:
        """Add values; return those that may be among the largest."""
        new = values
        if self._floor is not None:
            new = values.take(np.flatnonzero(values > self._floor))
        self._kept.append(new)
        self._num_kept += new.size
        if self._num_kept > 2 * self._num:
            first = self._num_kept - self._num
            largest = np.partition(np.concatenate(self._kept), first)[first:]
            self._kept, self._num_kept, self._floor = [largest], self._num, float(largest[0])
        return new

    def ascending(self) -> Float[np.ndarray, "L"]:
        """Return the largest values, or all if they are fewer, in ascending order."""
        kept = np.concatenate([np.zeros(0), *self._kept])
        largest: np.ndarray = np.sort(kept)[max(0, kept.size - self._num) :]
        return largest


def merge_tallies(tallies: list[TokenTally], merge: Merge) -> list[TokenDistribution | None]:
    """Return the distribution of each quantity over all processes; None without a value."""
    if not tallies:
        return []
    sums = merge.sum(np.stack([tally.sums for tally in tallies]))
    extremes = merge.max(np.stack([tally.extremes for tally in tallies]))
    filled = [index for index, (num, *_) in enumerate(sums) if num]
    tails = [_ends_of_tail(tallies[index], int(sums[index, 0])) for index in filled]
    ends = _merge_tails(tails, merge)
    found: list[TokenDistribution | None] = [None] * len(tallies)
    for index, end in zip(filled, ends, strict=True):
        found[index] = _describe(tallies[index], sums[index], extremes[index], end)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _TailValues:
    """The largest values of one process, and how many of all processes are wanted."""

    values: Float[np.ndarray, "_"]
    num_values: int
    sizes: Float[np.ndarray, "_"]
    num_sizes: int


def _ends_of_tail(tally: TokenTally, num: int) -> _TailValues:
    num_sizes = num_in_tail(num, tally.tail_fraction)
    num_values = num_above_quantile(num, tally.quantile)
    return _TailValues(
        values=tally.values.ascending()[-num_values:],
        num_values=num_values,
        sizes=tally.sizes.ascending()[-num_sizes:],
        num_sizes=num_sizes,
    )


def _merge_tails(
    tails: list[_TailValues], merge: Merge
) -> list[tuple[Float[np.ndarray, "pair"], float]]:
    """Return the two values around the quantile, and the sum of the largest absolute values."""
    if merge.size == 1:
        return [(tail.values[:2], float(tail.sizes.sum())) for tail in tails]
    if not tails:
        return []
    columns = [column for t in tails for column in (t.values, t.values, t.sizes)]
    ranks = [n for t in tails for n in (t.num_values, max(1, t.num_values - 1), t.num_sizes)]
    found = largest_of_all(columns, ranks, merge).reshape(-1, 3)
    above = [t.sizes[t.sizes > least] for t, least in zip(tails, found[:, 2], strict=True)]
    sums = merge.sum(np.array([[values.sum(), values.size] for values in above]))
    merged = []
    for tail, (low, high, least), (total, num) in zip(tails, found, sums, strict=True):
        # of those equal to the least, as many as are wanted
        equal = (tail.num_sizes - num) * least if tail.num_sizes > num else 0.0
        merged.append((np.array([low, high][: tail.num_values]), float(total + equal)))
    return merged


def _describe(
    tally: TokenTally,
    sums: Float[np.ndarray, "6"],
    extremes: Float[np.ndarray, "3"],
    end: tuple[Float[np.ndarray, "pair"], float],
) -> TokenDistribution:
    num, num_above, num_rows, total, sum_of_sizes, row_total = sums
    pair, tail = end
    position = (num - 1) * tally.quantile
    return TokenDistribution(
        mean=float(total / num),
        smallest=float(-extremes[1]),
        largest=float(extremes[0]),
        quantile=float(np.quantile(pair, position - int(position))),
        tail_share=float(tail / max(sum_of_sizes, 1e-300)),
        share_above=float(num_above / num),
        row_mean=float(row_total / num_rows),
        row_largest=float(extremes[2]),
    )


def num_above_quantile(num: int, quantile: float) -> int:
    """Return how many of `num` sorted values are at or above the lower one next to a quantile.

    >>> num_above_quantile(5, 0.5), num_above_quantile(4, 0.5)
    (3, 3)
    """
    return num - int((num - 1) * quantile)


def num_in_tail(num: int, fraction: float) -> int:
    """Return how many of `num` values are a fraction of them, at least one.

    >>> num_in_tail(5, 0.001), num_in_tail(5000, 0.001)
    (1, 5)
    """
    return max(1, round(fraction * num))
