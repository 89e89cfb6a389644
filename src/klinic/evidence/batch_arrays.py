"""Converts a batch of any loop to flat arrays: lists of rows, or padded arrays with a mask.

Torch tensors are accepted without importing torch: they are detached, moved to the CPU and, in
half precision, widened. A wrong shape raises `EvidenceError` with the argument's name.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from klinic.errors import EvidenceError, first_line
from klinic.evidence.rollout import offsets_from_lengths


@runtime_checkable
class ArrayLike(Protocol):
    """Anything that NumPy converts: an array, or a tensor of another library."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return the values as a NumPy array."""
        ...


RowsOfNumbers = ArrayLike | Sequence[Sequence[int | float]] | Sequence[ArrayLike]
"""Rows of different lengths, or a padded array with one row per completion."""
Numbers = ArrayLike | Sequence[int | float]
"""One number per completion."""


def to_array(values: Any) -> np.ndarray:
    """Return the values as a NumPy array; tensors are detached and widened first."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) in ("torch.bfloat16", "torch.float16"):
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def to_named_array(where: str, name: str, values: Any) -> np.ndarray:
    """Return the values as a NumPy array; refuse rows of different lengths."""
    try:
        return to_array(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise EvidenceError(
            f"{where}: `{name}` is no array: {first_line(error)} Pass lists of numbers, or one "
            "array; rows of different lengths are passed as lists, or padded with a mask."
        ) from None


def convert_values(where: str, name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array as `dtype`; refuse values that it cannot hold.

    >>> convert_values("step 1", "loss_mask", np.array([1, 0]), np.bool_).tolist()
    [True, False]
    >>> convert_values("step 1", "group", np.array([0.5]), np.int64)
    Traceback (most recent call last):
    klinic.errors.EvidenceError: step 1: `group` contains 0.5. Pass integers.
    """
    kind = np.dtype(dtype).kind
    if array.size and (array.dtype.kind == "U") != (kind == "U"):
        wanted = "strings" if kind == "U" else "numbers"
        found = repr(array.flat[0])
        raise EvidenceError(f"{where}: `{name}` contains {found}. Pass {wanted}.")
    if kind != "U" and array.dtype.kind not in "biuf":
        raise EvidenceError(
            f"{where}: `{name}` holds {array.dtype} values, such as {array.flat[0]!r}. Pass "
            "numbers; a missing value is NaN."
        )
    allowed = _allowed_values(array, kind)
    if allowed is not None and not allowed.all():
        wanted = "0 and 1, or booleans" if kind == "b" else "integers"
        raise EvidenceError(f"{where}: `{name}` contains {array[~allowed][0]}. Pass {wanted}.")
    return array.astype(dtype)


def _allowed_values(array: np.ndarray, kind: str) -> np.ndarray | None:
    """Return which values a boolean or integer array can hold; None if all."""
    if kind == "b":
        return np.isin(array, (0, 1))
    if kind == "i" and array.dtype.kind == "f":
        return np.asarray(np.isfinite(array) & (array == np.round(array)))
    return None


def split_rows(where: str, name: str, values: Any, mask: np.ndarray | None) -> list[np.ndarray]:
    """Return one array per row: of a padded array the entries that the mask selects."""
    if not _has_rows(values):
        shown = None if values is None else f"of type {type(values).__name__}"
        raise EvidenceError(f"{where}: `{name}` is {shown}. Pass one row of values per completion.")
    if mask is None:
        rows = [to_named_array(where, name, row) for row in values]
        wrong = [row for row, part in enumerate(rows) if part.ndim != 1]
        if wrong:
            raise EvidenceError(
                f"{where}: `{name}` has {rows[wrong[0]].ndim} dimensions in row {wrong[0]}, and a "
                "row is a list of numbers. Pass one list per completion."
            )
        return rows
    padded = to_named_array(where, name, values)
    if padded.shape != mask.shape:
        raise EvidenceError(
            f"{where}: `{name}` has shape {padded.shape}, its mask {mask.shape}, so padding cannot "
            "be told from tokens. Pass both padded to the same width."
        )
    return [row[keep] for row, keep in zip(padded, mask, strict=True)]


def split_ids(where: str, name: str, values: Any, mask: np.ndarray | None) -> list[np.ndarray]:
    """Return one array of token ids per row; refuse ids below 0, which are padding of labels."""
    rows = split_rows(where, name, values, mask)
    if not rows:
        return []
    ids = convert_values(where, name, np.concatenate(rows), np.int64)
    if (ids < 0).any():
        raise EvidenceError(
            f"{where}: `{name}` contains {ids[ids < 0][0]}, and a token id is 0 or more. Pass "
            "padded arrays with their mask, and the ids themselves, not labels of a loss."
        )
    return np.split(ids, np.cumsum([len(row) for row in rows])[:-1])


def to_mask(where: str, name: str, mask: Any) -> np.ndarray | None:
    """Return a mask of 0 and 1 as booleans."""
    if mask is None:
        return None
    array = to_named_array(where, name, mask)
    is_number = array.dtype.kind in "biuf"
    if array.ndim != 2 or not is_number or not np.isin(array, (0, 1)).all():
        values = f" and values from {array.min()} to {array.max()}" if array.size else ""
        raise EvidenceError(
            f"{where}: `{name}` has shape {array.shape}{values}; a mask has one row per completion "
            "and holds 0 and 1. Pass the mask of the real tokens."
        )
    return array.astype(np.bool_)


class BatchShape:
    """The rows of a batch: checks every other array against their lengths."""

    def __init__(self, where: str, completions: Sequence[np.ndarray], mask: np.ndarray | None):
        self._where = where
        self._mask = mask
        self.lengths = [len(row) for row in completions]
        self.row_offsets = offsets_from_lengths(self.lengths)

    def token_values(self, name: str, values: Any, dtype: Any) -> np.ndarray | None:
        """Return values per token, concatenated; None stays None."""
        if values is None:
            return None
        rows = split_rows(self._where, name, values, self._mask)
        self._check_count(name, len(rows))
        for row, (part, length) in enumerate(zip(rows, self.lengths, strict=True)):
            if len(part) != length:
                raise EvidenceError(
                    f"{self._where}: `{name}` has {len(part)} values in row {row}, its completion "
                    f"{length} tokens. Pass one value per token; position t belongs to token t."
                )
        return convert_values(self._where, name, np.concatenate(rows), dtype)

    def row_values(self, name: str, values: Any, dtype: Any) -> np.ndarray | None:
        """Return one value per completion; None stays None."""
        if values is None:
            return None
        array = to_named_array(self._where, name, values)
        if array.ndim != 1:
            raise EvidenceError(
                f"{self._where}: `{name}` has shape {array.shape}. Pass one value per completion."
            )
        self._check_count(name, len(array))
        return convert_values(self._where, name, array, dtype)

    def spread_over_tokens(self, name: str, values: Any, dtype: Any) -> np.ndarray | None:
        """Return values per token, from one number, one per completion, or one per token."""
        if values is None:
            return None
        if not _has_rows(values):
            array = to_named_array(self._where, name, values)
            return np.full(
                int(self.row_offsets[-1]), convert_values(self._where, name, array, dtype)
            )
        if has_token_axis(values):
            return self.token_values(name, values, dtype)
        rows = self.row_values(name, values, dtype)
        assert rows is not None  # noqa: S101 - values were given
        return np.repeat(rows, self.lengths)

    def _check_count(self, name: str, count: int) -> None:
        if count != len(self.lengths):
            raise EvidenceError(
                f"{self._where}: `{name}` has {count} rows, `completion_ids` {len(self.lengths)}. "
                "Pass the same completions, in the same order."
            )


def to_number(where: str, name: str, value: Any) -> float | int | None:
    """Return one number as Python's own; None stays None.

    >>> to_number("step 1", "loss", np.float32(0.5))
    0.5
    """
    if value is None:
        return None
    array = to_named_array(where, name, value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        shown = f"of shape {array.shape}" if array.ndim else f"{value!r}"
        raise EvidenceError(f"{where}: `{name}` is {shown}. Pass one number.")
    number: float | int = array.reshape(()).item()
    return number


def has_token_axis(values: Any) -> bool:
    """Whether values have one entry per token, and not per completion."""
    if hasattr(values, "ndim"):
        return int(values.ndim) > 1
    return (
        _has_rows(values)
        and len(values) > 0
        and hasattr(values[0], "__len__")
        and np.ndim(values[0]) > 0
    )


def _has_rows(values: Any) -> bool:
    return hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0
