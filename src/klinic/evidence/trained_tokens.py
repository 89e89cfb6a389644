"""The trained tokens of a record, and sums, means and tails of their values.

Columns are reduced to the trained tokens and converted to float64 once. Order statistics are exact:
they are those of the sorted values, but only the largest values are sorted. Sums of a row add in
pairs, which differs from adding in order by less than 1e-12 of the sum of the absolute values.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.evidence.record import StepRecord

SAMPLE_STRIDE = 64
"""One value in so many is looked at to guess which values are among the largest."""
MIN_SAMPLED = 8192
"""Fewer values are partitioned without a guess."""


class TrainedTokens:
    """Columns of a record at its trained tokens, in order, as float64; each is made once."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self.num = int(np.count_nonzero(record.loss_mask))
        self._mask = None if self.num == record.num_tokens else record.loss_mask
        self._values: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._row_offsets: np.ndarray | None = None

    @property
    def row_offsets(self) -> Int[np.ndarray, "offsets"]:
        """Start of each row among the trained tokens, and their number."""
        if self._row_offsets is None:
            offsets, mask = self._record.row_offsets, self._mask
            self._row_offsets = offsets if mask is None else offsets_among(mask, offsets)
        return self._row_offsets

    def select(self, values: np.ndarray) -> Float[np.ndarray, "K"]:
        """Return the values of the trained tokens among those of all tokens, in float64."""
        if id(values) not in self._values:
            trained = values if self._mask is None else values[self._mask]
            # with the key's array, so that its id is not used again
            self._values[id(values)] = values, np.asarray(trained, dtype=np.float64)
        return self._values[id(values)][1]

    def spread_rows(self, values: Float[np.ndarray, "B"]) -> Float[np.ndarray, "K"]:
        """Return for each trained token the value of its row."""
        spread: np.ndarray = np.repeat(values, np.diff(self.row_offsets))
        return spread


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


def describe_tokens(
    values: Float[np.ndarray, "K"],
    row_offsets: Int[np.ndarray, "offsets"],
    *,
    quantile: float,
    tail_fraction: float,
    limit: float,
) -> TokenDistribution:
    """Return the distribution of values without NaN; there must be at least one."""
    num, total, smallest = values.size, values.sum(), values.min()
    above_quantile = largest_values(values, num - int((num - 1) * quantile))
    size = values if smallest >= 0 else np.abs(values)
    num_tail = max(1, round(tail_fraction * num))
    tail = above_quantile if size is values else largest_values(size, num_tail)
    sum_of_sizes = total if size is values else size.sum()
    row_sums = sum_rows(values, row_offsets)[np.diff(row_offsets) > 0]
    return TokenDistribution(
        mean=float(total / num),
        smallest=float(smallest),
        largest=float(above_quantile[-1]),
        quantile=_quantile_of_largest(above_quantile, num, quantile),
        tail_share=float(tail[-num_tail:].sum() / max(sum_of_sizes, 1e-300)),
        share_above=float(np.count_nonzero(size > limit) / num),
        row_mean=float(row_sums.mean()),
        row_largest=float(row_sums.max()),
    )


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


def largest_values(values: Float[np.ndarray, "K"], num: int) -> Float[np.ndarray, "L"]:
    """Return the `num` largest values in ascending order; there must be no NaN.

    A floor guessed from a sample leaves a few candidates; without enough of them, all are taken.

    >>> largest_values(np.array([3.0, 1.0, 2.0]), 2)
    array([2., 3.])
    """
    candidates = values
    if values.size >= MIN_SAMPLED:
        sample = values[::SAMPLE_STRIDE]
        kept = min(sample.size, int(1.5 * num / SAMPLE_STRIDE) + 16)
        floor = np.partition(sample, sample.size - kept)[sample.size - kept]
        candidates = values[values >= floor]
        if candidates.size < num:
            candidates = values
    first = candidates.size - num
    return np.sort(np.partition(candidates, first)[first:])


def _quantile_of_largest(largest: np.ndarray, num: int, quantile: float) -> float:
    """Return NumPy's quantile of `num` values from those at and above it, in ascending order."""
    position = (num - 1) * quantile
    pair = largest[:2]
    return float(np.quantile(pair, position - int(position)))
