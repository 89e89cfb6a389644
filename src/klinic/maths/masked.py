"""Masked reductions over concatenated tokens, as weighted sums.

    name           weight of a trained token t of row b
    token_mean     1 / (trained tokens of the step)
    sequence_mean  1 / (trained tokens of row b) / (rows with a trained token)
    constant       1 / length / (rows with a trained token)

Weights are computed from the mask of the whole step and then sliced with the batch, so that
micro-batches and ranks cannot change a denominator; a process with some rows of the step passes the
counts of all as `totals`. Outside the mask the weight is 0 and the value
is replaced, not multiplied: not even a NaN leaks into a value or a gradient.

Sources: sequence_mean, Z. Shao et al., "DeepSeekMath" (2024), eq. 3; token_mean, Q. Yu et al.,
"DAPO" (2025), section 3.3; constant, Z. Liu et al., "Understanding R1-Zero-Like Training" (2025).
"""

from dataclasses import dataclass
from typing import Any, Literal, assert_never

from jaxtyping import Bool, Float, Int

from klinic.errors import ConfigError
from klinic.maths.arrays import RowOffsets, array_namespace, check_rows, masked_count, row_of_token

FloatDType = Any
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTotals:
    """Counts over the mask of the whole step, for a mask of some of its rows."""

    num_tokens: Int[Any, ""]
    """Trained tokens."""
    num_rows: Int[Any, ""]
    """Rows with a trained token."""


def apply_mask(values: Float[Any, "N"], loss_mask: Bool[Any, "N"]) -> Float[Any, "N"]:
    """Return the values inside the mask and 0 outside, for values and gradients alike.

    Formula: x_t if m_t else 0.
    Symbols: x, any value per token; m, `loss_mask`.
    Assumes: nothing; x may be non-finite outside the mask.
    Source: the double-where rule, https://docs.jax.dev/en/latest/faq.html: select before the
    formula, since 0 * NaN is NaN in the backward pass.

    >>> import numpy as np
    >>> apply_mask(np.array([1.0, np.nan]), np.array([True, False]))
    array([1., 0.])
    """
    return array_namespace(values).where(loss_mask, values, 0.0)


def weighted_sum(values: Float[Any, "N"], weights: Float[Any, "N"]) -> Float[Any, ""]:
    """Return the sum of weights * values over the tokens with a nonzero weight.

    Formula: sum over t with w_t != 0 of w_t * x_t.
    Symbols: x, a value per token; w, weights from `token_mean`, `sequence_mean` or `constant`.
    Assumes: weights of the whole step, or a slice of them.
    Source: this module's table.

    >>> import numpy as np
    >>> float(weighted_sum(np.array([2.0, 4.0, np.nan]), np.array([0.5, 0.5, 0.0])))
    3.0
    """
    return (apply_mask(values, weights != 0) * weights).sum()


def token_mean(
    loss_mask: Bool[Any, "N"], *, dtype: FloatDType, totals: MaskTotals | None = None
) -> Float[Any, "N"]:
    """Return equal weights for all trained tokens of the step.

    Formula: w_t = m_t / sum(m).
    Symbols: m, `loss_mask` of the whole step.
    Assumes: the mask, or `totals`, is of the whole step; an empty mask gives weights of 0.
    Source: DAPO (2025), section 3.3.

    >>> import numpy as np
    >>> token_mean(np.array([True, False, True, True, True]), dtype=np.float64)
    array([0.25, 0.  , 0.25, 0.25, 0.25])
    """
    num_tokens = loss_mask.sum() if totals is None else totals.num_tokens
    return _cast_to(loss_mask, dtype) / _cast_to(num_tokens.clip(min=1), dtype)


def sequence_mean(
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
    *,
    dtype: FloatDType,
    totals: MaskTotals | None = None,
) -> Float[Any, "N"]:
    """Return weights with an equal sum for every row: tokens of long rows weigh less.

    Formula: w_t = m_t / n_b / R with n_b = sum of m over row b and R = number of rows, n_b > 0.
    Symbols: m, `loss_mask` of the whole step; b, the row of token t.
    Assumes: the mask, or `totals`, is of the whole step; rows without a trained token are not
    counted.
    Source: DeepSeekMath (2024), eq. 3.

    >>> import numpy as np
    >>> sequence_mean(np.array([True, True, True]), np.array([0, 2, 3]), dtype=np.float64)
    array([0.25, 0.25, 0.5 ])
    """
    length, num_rows = _count_trained_tokens(loss_mask, row_offsets, dtype, totals)
    row = row_of_token(row_offsets, len(loss_mask))
    return _cast_to(loss_mask, dtype) / length.clip(min=1)[row] / num_rows


def constant(
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
    *,
    length: int,
    dtype: FloatDType,
    totals: MaskTotals | None = None,
) -> Float[Any, "N"]:
    """Return weights that do not depend on the lengths of the rows.

    Formula: w_t = m_t / L / R with R = number of rows that have a trained token.
    Symbols: m, `loss_mask` of the whole step; L, `length`, usually the maximum completion length.
    Assumes: the mask, or `totals`, is of the whole step; L is the same at every step.
    Source: Dr. GRPO (2025), section 3.

    >>> import numpy as np
    >>> mask, offsets = np.array([True, True, False]), np.array([0, 2, 3])
    >>> constant(mask, offsets, length=10, dtype=np.float64)
    array([0.1, 0.1, 0. ])
    """
    if length < 1:
        raise ConfigError(
            f"the constant length is {length}: it divides the loss. Use the maximum completion "
            "length of sampling."
        )
    _, num_rows = _count_trained_tokens(loss_mask, row_offsets, dtype, totals)
    return _cast_to(loss_mask, dtype) / length / num_rows


def aggregation_weights(
    aggregation: Aggregation,
    *,
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
    length: int,
    dtype: FloatDType,
    totals: MaskTotals | None = None,
) -> Float[Any, "N"]:
    """Return the weights of the named aggregation; only `constant` reads `length`.

    Formula: the row of that name in this module's table.
    Symbols: as in the three functions above.
    Assumes: mask and offsets, or `totals`, are of the whole step.
    Source: this module's table.

    >>> import numpy as np
    >>> mask, offsets = np.array([True, True, True]), np.array([0, 2, 3])
    >>> args = dict(loss_mask=mask, row_offsets=offsets, length=10, dtype=np.float64)
    >>> aggregation_weights("sequence_mean", **args)
    array([0.25, 0.25, 0.5 ])
    """
    match aggregation:
        case "token_mean":
            return token_mean(loss_mask, dtype=dtype, totals=totals)
        case "sequence_mean":
            return sequence_mean(loss_mask, row_offsets, dtype=dtype, totals=totals)
        case "constant":
            return constant(loss_mask, row_offsets, length=length, dtype=dtype, totals=totals)
    assert_never(aggregation)


def exclude_rows(
    loss_mask: Bool[Any, "N"], dropped: Bool[Any, "B"], row_offsets: Int[Any, "B+1"]
) -> Bool[Any, "N"]:
    """Return the mask without the tokens of the dropped rows.

    Formula: m_t and not dropped_b.
    Symbols: m, `loss_mask`; b, the row of token t.
    Assumes: weights are computed from the result, so that the rows leave the denominator too.
    Source: DAPO (2025), section 3.4, overlong filtering.

    >>> import numpy as np
    >>> mask, offsets = np.array([True, True, True]), np.array([0, 2, 3])
    >>> exclude_rows(mask, np.array([False, True]), offsets)
    array([ True,  True, False])
    """
    check_rows(row_offsets, loss_mask=loss_mask)
    return loss_mask & ~dropped[row_of_token(row_offsets, len(loss_mask))]


def _count_trained_tokens(
    loss_mask: Any, row_offsets: Any, dtype: FloatDType, totals: MaskTotals | None
) -> tuple[Any, Any]:
    """Return the number of trained tokens of each row, and the number of rows with any."""
    check_rows(row_offsets, loss_mask=loss_mask)
    row = row_of_token(row_offsets, len(loss_mask))
    length = masked_count(loss_mask, row, len(row_offsets) - 1)
    num_rows = (length > 0).sum() if totals is None else totals.num_rows
    return _cast_to(length, dtype), _cast_to(num_rows.clip(min=1), dtype)


def _cast_to(x: Any, dtype: FloatDType) -> Any:
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)
