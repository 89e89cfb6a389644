"""Importance ratios of tokens and rows: probability under the policy over that when sampled.

Write r_t = exp(logp_t - logp_old_t). Ratios to the sampler replace `logp_old` by `logp_sampler`.

Sources: token ratio and clipping, J. Schulman et al., "Proximal Policy Optimization" (2017), eq. 7;
sequence ratio, C. Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 7; effective
sample size, A. Kong, "A Note on Importance Sampling using Standardized Weights" (1992).
"""

from typing import Any

from jaxtyping import Bool, Float

from klinic.errors import ConfigError
from klinic.maths.arrays import (
    RowOffsets,
    array_namespace,
    check_rows,
    masked_count,
    row_of_token,
    segment_sum,
)
from klinic.maths.masked import apply_mask


def token_ratio(
    *, logp: Float[Any, "*shape"], logp_old: Float[Any, "*shape"]
) -> Float[Any, "*shape"]:
    """Return the importance ratio of each token.

    Formula: exp(logp - logp_old).
    Symbols: logp, of the current policy, with gradient; logp_old, of the policy that sampled.
    Assumes: both are of the same token at the same temperature.
    Source: PPO (2017), eq. 6.

    >>> import numpy as np
    >>> token_ratio(logp=np.log([0.5]), logp_old=np.log([0.25])).round(4)
    array([2.])
    """
    return array_namespace(logp).exp(logp - logp_old)


def sequence_ratio(
    *,
    logp: Float[Any, "N"],
    logp_old: Float[Any, "N"],
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
) -> Float[Any, "N"]:
    """Return the geometric mean of a row's token ratios, repeated for each of its tokens.

    Formula: s_b = exp(sum over trained t of row b of (logp - logp_old) / n_b).
    Symbols: n_b, the trained tokens of row b; a row without any has s_b = 1.
    Assumes: a row is one completion of one prompt.
    Source: GSPO (2025), eq. 7.

    >>> import numpy as np
    >>> every, one_row = np.array([True, True]), np.array([0, 2])
    >>> args = dict(logp_old=np.log([0.5, 0.5]), loss_mask=every, row_offsets=one_row)
    >>> sequence_ratio(logp=np.log([0.5, 0.125]), **args).round(4)
    array([0.5, 0.5])
    """
    log_ratio = sequence_log_ratio(
        logp=logp, logp_old=logp_old, loss_mask=loss_mask, row_offsets=row_offsets
    )
    return array_namespace(logp).exp(log_ratio)


def sequence_log_ratio(
    *,
    logp: Float[Any, "N"],
    logp_old: Float[Any, "N"],
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
) -> Float[Any, "N"]:
    """Return the mean log-ratio of a row's trained tokens, repeated for each of its tokens.

    Formula: sum over trained t of row b of (logp - logp_old) / n_b.
    Symbols: n_b, the trained tokens of row b; a row without any has 0.
    Assumes: a row is one completion of one prompt.
    Source: GSPO (2025), eq. 7.

    >>> import numpy as np
    >>> every, one_row = np.array([True, True]), np.array([0, 2])
    >>> args = dict(logp_old=np.zeros(2), loss_mask=every, row_offsets=one_row)
    >>> sequence_log_ratio(logp=np.array([0.1, 0.3]), **args).round(4)
    array([0.2, 0.2])
    """
    total = row_log_ratio(
        logp=logp, logp_old=logp_old, loss_mask=loss_mask, row_offsets=row_offsets
    )
    row, num_rows = row_of_token(row_offsets, len(logp)), len(row_offsets) - 1
    length = masked_count(loss_mask, row, num_rows).clip(min=1)
    return total / length[row]


def row_log_ratio(
    *,
    logp: Float[Any, "N"],
    logp_old: Float[Any, "N"],
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
) -> Float[Any, "N"]:
    """Return the log-ratio of a row's trained tokens together, repeated for each of its tokens.

    Formula: sum over trained t of row b of (logp - logp_old).
    Symbols: b, the row of the token; a row without trained tokens has 0.
    Assumes: a row is one completion of one prompt.
    Source: the probability of a completion is the product of those of its tokens.

    >>> import numpy as np
    >>> every, one_row = np.array([True, True]), np.array([0, 2])
    >>> args = dict(logp_old=np.zeros(2), loss_mask=every, row_offsets=one_row)
    >>> row_log_ratio(logp=np.array([0.1, 0.3]), **args).round(4)
    array([0.4, 0.4])
    """
    check_rows(row_offsets, logp=logp, logp_old=logp_old, loss_mask=loss_mask)
    row, num_rows = row_of_token(row_offsets, len(logp)), len(row_offsets) - 1
    log_ratio = apply_mask(logp, loss_mask) - apply_mask(logp_old, loss_mask)
    return segment_sum(log_ratio, row, num_rows)[row]


def clip(ratio: Float[Any, "*shape"], *, clip_low: float, clip_high: float) -> Float[Any, "*shape"]:
    """Return the ratio clipped to [1 - clip_low, 1 + clip_high].

    Formula: min(max(r, 1 - clip_low), 1 + clip_high).
    Symbols: r, a ratio; clip_low, clip_high, largest distance below and above 1.
    Assumes: 0 <= clip_low <= 1 and clip_high >= 0.
    Source: PPO (2017), eq. 7; unequal bounds, DAPO (2025), section 3.1.

    >>> import numpy as np
    >>> clip(np.array([0.5, 1.0, 2.0]), clip_low=0.2, clip_high=0.25)
    array([0.8 , 1.  , 1.25])
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ConfigError(
            f"clip_low is {clip_low} and clip_high is {clip_high}: the ratio is clipped to "
            "[1 - clip_low, 1 + clip_high], which must contain 1. Start with 0.2 for both."
        )
    return ratio.clip(1 - clip_low, 1 + clip_high)


def effective_sample_size(*, log_weight: Float[Any, "K"]) -> Float[Any, ""]:
    """Return the effective sample size as a fraction of the samples: 1 for equal weights.

    Formula: (sum w)^2 / (n sum w^2) with w = exp(log_weight).
    Symbols: n, the number of weights.
    Assumes: at least one weight. Invariant to a common factor, so the largest is scaled to 1.
    Source: Kong (1992).

    >>> import numpy as np
    >>> float(effective_sample_size(log_weight=np.array([800.0, 800.0])))
    1.0
    """
    weight = array_namespace(log_weight).exp(log_weight - log_weight.max())
    return weight.sum() ** 2 / (len(weight) * (weight**2).sum())
