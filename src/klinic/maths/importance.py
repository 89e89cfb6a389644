"""Importance weights of completions that another policy sampled, in four modes.

Write l_t = logp_t - logp_sampler_t for a trained token t, and L_b for the sum of l over row b.

    mode               weight of token t of row b            elsewhere
    token_truncate     min(exp(l_t), cap)                    TRL's mode; verl: rollout_is=token
    token_mask         exp(l_t), or 0 above the cap          TRL's mode
    sequence_truncate  min(exp(L_b), cap)                    TRL's mode; verl: rollout_is=sequence
    sequence_mask      exp(L_b), or 0 above the cap          TRL's mode and default

Without a cap, token weights correct the choice of each token, but not the prefixes: those are still
visited as often as the sampler visits them. Sequence weights correct both, with a variance that
grows with the length of completions. A cap adds a bias; `klinic verify` measures it for each mode.

Sources: truncated weights, E. Ionides, "Truncated Importance Sampling" (2008); the modes, TRL's
`vllm_importance_sampling_mode` (1.16) and verl's `rollout_is` (0.9.1).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Float

from klinic.errors import ConfigError
from klinic.maths.arrays import RowOffsets, array_namespace, check_rows
from klinic.maths.ratio import row_log_ratio

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
DEFAULT_CAP = 2.0  # the usual truncated importance sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """Mode and cap of the weights."""

    mode: Mode = "token_truncate"
    cap: float = DEFAULT_CAP
    """Largest weight; math.inf for none."""

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ConfigError(
                f"the cap of the importance weights is {self.cap}: it must be positive. "
                f"{DEFAULT_CAP} is the default, math.inf disables it."
            )

    @property
    def by_sequence(self) -> bool:
        """Whether all tokens of a row have the weight of the row."""
        return self.mode in ("sequence_truncate", "sequence_mask")

    @property
    def masks(self) -> bool:
        """Whether a weight above the cap becomes 0 rather than the cap."""
        return self.mode in ("token_mask", "sequence_mask")


def importance_weight(
    sampling: ImportanceSampling,
    *,
    logp: Float[Any, "N"],
    logp_sampler: Float[Any, "N"],
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
) -> Float[Any, "N"]:
    """Return the importance weight of each token.

    Formula: see the table of this file.
    Symbols: logp, of the policy; logp_sampler, of the sampler.
    Assumes: logp_sampler is of the distribution that the token was sampled from. The cap applies to
    the log-ratio, so that exp cannot overflow.
    Source: Ionides (2008) and TRL's modes.

    >>> import numpy as np
    >>> args = dict(logp=np.log([0.4, 0.6]), logp_sampler=np.log([0.2, 0.2]),
    ...     loss_mask=np.array([True, True]), row_offsets=np.array([0, 2]))
    >>> importance_weight(ImportanceSampling(mode="token_truncate", cap=2.5), **args).round(4)
    array([2. , 2.5])
    >>> importance_weight(ImportanceSampling(mode="token_mask", cap=2.5), **args).round(4)
    array([2., 0.])
    >>> importance_weight(ImportanceSampling(mode="sequence_truncate", cap=9.0), **args).round(4)
    array([6., 6.])
    """
    log_weight = _log_weight(sampling, logp, logp_sampler, loss_mask, row_offsets)
    xp = array_namespace(log_weight)
    weight = xp.exp(log_weight.clip(max=math.log(sampling.cap)))
    return xp.where(_is_above(log_weight, sampling.cap), 0.0, weight) if sampling.masks else weight


def above_cap(
    sampling: ImportanceSampling,
    *,
    logp: Float[Any, "N"],
    logp_sampler: Float[Any, "N"],
    loss_mask: Bool[Any, "N"],
    row_offsets: RowOffsets,
) -> Bool[Any, "N"]:
    """Return which trained tokens have a weight above the cap.

    Formula: l_t > log cap, or L_b > log cap.
    Symbols: as in `importance_weight`.
    Assumes: the same.
    Source: the table of this file.

    >>> import numpy as np
    >>> above_cap(ImportanceSampling(cap=2.5), logp=np.log([0.4, 0.6]),
    ...     logp_sampler=np.log([0.2, 0.2]), loss_mask=np.array([True, True]),
    ...     row_offsets=np.array([0, 2]))
    array([False,  True])
    """
    log_weight = _log_weight(sampling, logp, logp_sampler, loss_mask, row_offsets)
    return _is_above(log_weight, sampling.cap) & loss_mask


def _log_weight(
    sampling: ImportanceSampling, logp: Any, logp_sampler: Any, loss_mask: Any, row_offsets: Any
) -> Any:
    if sampling.by_sequence:
        return row_log_ratio(
            logp=logp, logp_old=logp_sampler, loss_mask=loss_mask, row_offsets=row_offsets
        )
    check_rows(row_offsets, logp=logp, logp_sampler=logp_sampler, loss_mask=loss_mask)
    return logp - logp_sampler


def _is_above(log_weight: Any, cap: float) -> Any:
    return log_weight > math.log(cap)
