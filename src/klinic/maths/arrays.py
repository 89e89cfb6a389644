"""Array operations that NumPy and torch spell differently.

Formulas take `exp`, `where` and the like from `array_namespace(x)`, so one source serves both
libraries and this package does not import torch.
"""

import sys
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.errors import ShapeError

RowOffsets = Int[Any, "offsets"]
"""Start of each row, then the total number of tokens: B + 1 entries."""


def array_namespace(x: Any) -> Any:
    """Return the array library of `x`: the module `numpy` or the module `torch`.

    >>> array_namespace(np.zeros(3)).__name__
    'numpy'
    """
    name = type(x).__module__.partition(".")[0]
    if name not in {"numpy", "torch"}:
        raise TypeError(
            f"expected a NumPy array or a torch tensor, got {type(x).__name__}: the formulas "
            "compute in the library of their input. Convert it with np.asarray or torch.as_tensor."
        )
    return sys.modules[name]


def stop_gradient(x: Any) -> Any:
    """Return `x` detached from autograd; a NumPy array is returned unchanged.

    >>> stop_gradient(np.array([1.5]))
    array([1.5])
    """
    return x.detach() if hasattr(x, "detach") else x


def segment_sum(
    values: Float[Any, "K"], segment: Int[Any, "K"], num_segments: int
) -> Float[Any, "S"]:
    """Return the sum of the values of each segment. Segments without a value get 0.

    >>> segment_sum(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 0]), 3)
    array([5., 0., 2.])
    """
    xp = array_namespace(values)
    total = xp.zeros(num_segments, dtype=values.dtype, device=values.device)
    if xp is np:
        np.add.at(total, segment, values)
        return total
    return total.index_add(0, segment, values)


def segment_count(segment: Int[Any, "K"], num_segments: int) -> Int[Any, "S"]:
    """Return the number of entries of each segment, as integers: half precision cannot count.

    >>> segment_count(np.array([0, 2, 0]), 3)
    array([2, 0, 1])
    """
    xp = array_namespace(segment)
    if xp is np:
        return xp.bincount(segment, minlength=num_segments)
    # torch's bincount reads the largest id, for which the host would wait
    counts = xp.zeros(num_segments, dtype=xp.int64, device=segment.device)
    return counts.index_add(0, segment, xp.ones_like(segment, dtype=xp.int64))


def masked_count(mask: Bool[Any, "K"], segment: Int[Any, "K"], num_segments: int) -> Int[Any, "S"]:
    """Return the number of entries of each segment inside the mask.

    >>> masked_count(np.array([True, False, True]), np.array([0, 0, 2]), 3)
    array([1, 0, 1])
    """
    xp = array_namespace(segment)
    if xp is np:
        return segment_count(segment[mask], num_segments)
    # a masked index has a size that the host would wait for
    counts = xp.zeros(num_segments, dtype=xp.int64, device=segment.device)
    return counts.index_add(0, segment, mask.to(xp.int64))


def dense_ids(group: Int[Any, "B"]) -> Int[Any, "B"]:
    """Renumber the ids as 0, 1, 2, ...: prompt ids may be large, sparse or negative.

    On an accelerator numbers are left out, but all are below the number of entries.

    >>> dense_ids(np.array([700, -1, 700]))
    array([1, 0, 1])
    """
    xp = array_namespace(group)
    if is_on_host(group):
        return xp.unique(group, return_inverse=True)[1]
    # the distinct ids have a number that the host would wait for
    return xp.searchsorted(group.sort().values, group)


def segment_max(
    values: Float[Any, "K"], segment: Int[Any, "K"], num_segments: int
) -> Float[Any, "S"]:
    """Return the largest value of each segment. Segments without a value get -inf.

    >>> segment_max(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 0]), 3)
    array([  4., -inf,   2.])
    """
    xp = array_namespace(values)
    maximum = xp.full((num_segments,), -xp.inf, dtype=values.dtype, device=values.device)
    if xp is np:
        np.maximum.at(maximum, segment, values)
        return maximum
    return maximum.scatter_reduce(0, segment, values, "amax")


def logsumexp(x: Float[Any, "*shape V"]) -> Float[Any, "*shape"]:
    """Return log(sum(exp(x))) over the last axis without overflow.

    >>> logsumexp(np.array([1000.0, 1000.0])).round(4)
    np.float64(1000.6931)
    """
    xp = array_namespace(x)
    return np.logaddexp.reduce(x, axis=-1) if xp is np else xp.logsumexp(x, -1)


def top_k_indices(x: Float[Any, "*shape V"], k: int) -> Int[Any, "*shape K"]:
    """Return the indices of the `k` largest entries of the last axis, unordered.

    >>> sorted(top_k_indices(np.array([0.1, 0.7, 0.2]), 2).tolist())
    [1, 2]
    """
    if array_namespace(x) is np:
        return np.argpartition(x, -k, axis=-1)[..., -k:]
    return x.topk(k, dim=-1, sorted=False).indices


def take_last(x: Float[Any, "*shape V"], index: Int[Any, "*shape K"]) -> Float[Any, "*shape K"]:
    """Return the entries of the last axis at the indices.

    >>> take_last(np.array([[1.0, 2.0, 3.0]]), np.array([[2, 0]]))
    array([[3., 1.]])
    """
    xp = array_namespace(x)
    return np.take_along_axis(x, index, -1) if xp is np else xp.take_along_dim(x, index, -1)


def fill_last(x: Float[Any, "*shape V"], index: Int[Any, "*shape K"], value: float) -> Any:
    """Return a copy of `x` with `value` at the indices of the last axis.

    >>> fill_last(np.array([[1.0, 2.0, 3.0]]), np.array([[1]]), 0.0)
    array([[1., 0., 3.]])
    """
    if array_namespace(x) is np:
        filled = x.copy()
        np.put_along_axis(filled, index, value, axis=-1)
        return filled
    return x.scatter(-1, index, value)


def row_of_token(row_offsets: RowOffsets, num_tokens: int | None = None) -> Int[Any, "N"]:
    """Return the row number of every token. Rows may be empty.

    `num_tokens`, where the caller knows it, saves the host from waiting for the last offset.

    >>> row_of_token(np.array([0, 2, 2, 3]))
    array([0, 0, 2])
    """
    xp = array_namespace(row_offsets)
    num_tokens = int(row_offsets[-1]) if num_tokens is None else num_tokens
    tokens = xp.arange(num_tokens, device=row_offsets.device)
    # searchsorted: repeat and repeat_interleave differ in names and arguments
    return xp.searchsorted(row_offsets[1:], tokens, side="right")


def sum_to_go(values: Float[Any, "N"], row_offsets: RowOffsets) -> Float[Any, "N"]:
    """Return for every token the sum of its value and all later values of its row.

    Adds sums of 1, 2, 4, ... neighbours of the same row: no loop over rows, and, unlike a running
    sum over all tokens, no rounding error or NaN crosses from row to row.

    >>> sum_to_go(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 3, 4]))
    array([7., 6., 4., 8.])
    """
    xp, row = array_namespace(values), row_of_token(row_offsets, len(values))
    longest = len(values)
    if longest and is_on_host(row_offsets):  # elsewhere the host would wait for it
        longest = int((row_offsets[1:] - row_offsets[:-1]).max())
    total, offset = values, 1
    while offset < longest:
        later = xp.where(row[:-offset] == row[offset:], total[offset:], 0.0)
        total = xp.concatenate([total[:-offset] + later, total[-offset:]])
        offset *= 2
    return total


def sum_after(values: Float[Any, "N"], row_offsets: RowOffsets) -> Float[Any, "N"]:
    """Return for every token the sum of all later values of its row, excluding its own.

    >>> sum_after(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 3, 4]))
    array([6., 4., 0., 0.])
    """
    xp, row = array_namespace(values), row_of_token(row_offsets, len(values))
    next_values = xp.where(row[:-1] == row[1:], values[1:], 0.0)
    # shift before the sum: subtracting a large own value would cancel small later ones
    return sum_to_go(xp.concatenate([next_values, xp.zeros_like(values[-1:])]), row_offsets)


def check_one_per_row(row_offsets: Any, **arrays_of_rows: Any) -> None:
    """Raise ShapeError for an array without exactly one entry per row of `row_offsets`.

    >>> check_one_per_row(np.array([0, 2]), group=np.zeros(3))
    Traceback (most recent call last):
        ...
    klinic.errors.ShapeError: `group` has 3 entries, but `row_offsets` describes 1 rows. Give one \
entry per completion.
    """
    num_rows = len(row_offsets) - 1
    for name, array in arrays_of_rows.items():
        if tuple(array.shape) != (num_rows,):
            raise ShapeError(
                f"`{name}` has {'x'.join(map(str, array.shape))} entries, but `row_offsets` "
                f"describes {num_rows} rows. Give one entry per completion."
            )


def check_rows(row_offsets: Any, **arrays_of_tokens: Any) -> None:
    """Raise ShapeError for invalid `row_offsets` or a token array of another length.

    >>> check_rows(np.array([0, 2]), logp=np.zeros(3))
    Traceback (most recent call last):
        ...
    klinic.errors.ShapeError: `logp` has 3 tokens, but `row_offsets` ends at 2. Concatenate the \
same rows in every token array.

    On an accelerator only the lengths are compared: to read the offsets the host would wait.
    """
    if not is_on_host(row_offsets):
        _check_equal_lengths(arrays_of_tokens)
        return
    num_tokens = int(row_offsets[-1])
    if int(row_offsets[0]) != 0 or bool((row_offsets[1:] < row_offsets[:-1]).any()):
        raise ShapeError(
            "`row_offsets` must start at 0 and never decrease: row b owns the tokens "
            "row_offsets[b] to row_offsets[b + 1]."
        )
    for name, array in arrays_of_tokens.items():
        if array is not None and tuple(array.shape) != (num_tokens,):
            raise ShapeError(
                f"`{name}` has {'x'.join(map(str, array.shape))} tokens, but `row_offsets` ends at "
                f"{num_tokens}. Concatenate the same rows in every token array."
            )


def is_on_host(array: Any) -> bool:
    """Whether the host can read an array without waiting for a device."""
    return array_namespace(array) is np or array.device.type == "cpu"


def _check_equal_lengths(arrays_of_tokens: dict[str, Any]) -> None:
    shapes = {n: tuple(x.shape) for n, x in arrays_of_tokens.items() if x is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ShapeError(
            f"the token arrays have different shapes: {shapes}. Concatenate the same rows in every "
            "token array."
        )
