"""Policy terms of the loss, per token, to be minimised.

Write r for the token ratio exp(logp - logp_old), s for the row's geometric mean of it, A for the
advantage of the row, and c(.) for clipping to [1 - clip_low, 1 + clip_high].

    name           term per token                 aggregation of maths/masked.py
    grpo           -min(r A, c(r) A)              sequence_mean
    dr_grpo        -min(r A, c(r) A)              constant
    bnpo, dapo     -min(r A, c(r) A)              token_mean
    gspo           -min(s A, c(s) A)              sequence_mean
    cispo          -sg(min(r, 1 + clip_high)) A logp, as a score    token_mean

Elsewhere bnpo averages over a local batch and dapo over the whole one. Here weights always come
from the whole step, so both are the same. (The papers of dapo and cispo divide by the tokens of
each prompt's group; trainers, and klinic, by those of the step.)

To exclude completions truncated at the length limit from the policy term, compute the weights from
`exclude_rows(loss_mask, truncated, row_offsets)`: they leave numerator and denominator. The KL term
still includes them, since its weights come from the full mask.

Sources: DeepSeekMath (2024), eq. 3; Dr. GRPO (2025); DAPO (2025), eq. 8; GSPO (2025), eq. 5;
"MiniMax-M1" (2025), eq. 4, for cispo.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int

from klinic.maths.arrays import array_namespace, check_one_per_row, check_rows, row_of_token
from klinic.maths.masked import Aggregation, apply_mask
from klinic.maths.ratio import clip, sequence_log_ratio, token_ratio
from klinic.maths.score import score_term


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Tensors that the policy term of one step reads. Rows are concatenated."""

    advantage: Float[Any, "B"]
    """One per row: all tokens of a completion share it."""
    row_offsets: Int[Any, "B+1"]
    logp: Float[Any, "N"]
    logp_old: Float[Any, "N"]
    loss_mask: Bool[Any, "N"]
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_rows(
            self.row_offsets, logp=self.logp, logp_old=self.logp_old, loss_mask=self.loss_mask
        )
        check_one_per_row(self.row_offsets, advantage=self.advantage)

    def masked_token_arrays(self) -> tuple[Any, Any, Any]:
        """Return logp, logp_old and advantage per token, each 0 outside the mask."""
        advantage = self.advantage[row_of_token(self.row_offsets, len(self.logp))]
        return tuple(apply_mask(x, self.loss_mask) for x in (self.logp, self.logp_old, advantage))


def clipped_surrogate(inputs: PolicyInputs) -> Float[Any, "N"]:
    """Return the clipped surrogate with the token ratio: grpo, dr_grpo, bnpo, dapo.

    Formula: -min(r A, c(r) A).
    Symbols: r = exp(logp - logp_old); A, the advantage of the row; c, clipping.
    Assumes: tokens sampled at logp_old. 0 outside the mask.
    Source: PPO (2017), eq. 7.

    >>> import numpy as np
    >>> clipped_surrogate(PolicyInputs(
    ...     advantage=np.array([2.0]), row_offsets=np.array([0, 2]), logp=np.log([0.5, 0.9]),
    ...     logp_old=np.log([0.5, 0.3]), loss_mask=np.array([True, True])))
    array([-2. , -2.4])
    """
    logp, logp_old, advantage = inputs.masked_token_arrays()
    return _clipped_objective(logp - logp_old, advantage, inputs)


def clipped_sequence_surrogate(inputs: PolicyInputs) -> Float[Any, "N"]:
    """Return the clipped surrogate with the row's ratio: gspo.

    Formula: -min(s A, c(s) A).
    Symbols: s, the geometric mean of the row's token ratios; A, the advantage; c, clipping.
    Assumes: summed with `sequence_mean`, where the weights of a row's equal terms sum to 1 / rows.
    Source: GSPO (2025), eq. 5. Useful clip bounds are far smaller than for tokens (3e-4, 4e-4).

    >>> import numpy as np
    >>> clipped_sequence_surrogate(PolicyInputs(
    ...     advantage=np.array([2.0]), row_offsets=np.array([0, 2]), logp=np.log([0.5, 0.9]),
    ...     logp_old=np.log([0.5, 0.9]), loss_mask=np.array([True, False])))
    array([-2., -0.])
    """
    logp, logp_old, advantage = inputs.masked_token_arrays()
    log_ratio = sequence_log_ratio(
        logp=logp, logp_old=logp_old, loss_mask=inputs.loss_mask, row_offsets=inputs.row_offsets
    )
    return _clipped_objective(log_ratio, advantage, inputs)


def clipped_weight_surrogate(inputs: PolicyInputs) -> Float[Any, "N"]:
    """Return the score-function term weighted by the ratio, clipped above: cispo.

    Formula: -sg(min(r, 1 + clip_high)) A logp; the value is -min(r, 1 + clip_high) A.
    Symbols: r = exp(logp - logp_old); A, the advantage of the row.
    Assumes: tokens sampled at logp_old. Every token keeps a gradient; clip_low is not used.
    Source: MiniMax-M1 (2025), eq. 4.

    >>> import numpy as np
    >>> clipped_weight_surrogate(PolicyInputs(
    ...     advantage=np.array([2.0]), row_offsets=np.array([0, 2]), logp=np.log([0.5, 0.9]),
    ...     logp_old=np.log([0.5, 0.3]), loss_mask=np.array([True, True]))).round(4)
    array([-2. , -2.4])
    """
    logp, logp_old, advantage = inputs.masked_token_arrays()
    ratio = token_ratio(logp=logp, logp_old=logp_old)
    coef = -clip(ratio, clip_low=1.0, clip_high=inputs.clip_high) * advantage
    return score_term(coef, logp=logp, value=coef)


def _clipped_objective(log_ratio: Any, advantage: Any, inputs: PolicyInputs) -> Any:
    xp = array_namespace(log_ratio)
    # With A > 0 the ratio is clipped above the bound anyway, and with A = 0 the term is 0: bound
    # the log-ratio before exp can overflow, since 0 * inf would make the gradient NaN. With A < 0
    # there is no such bound: where the ratio overflows, the loss is infinite and is detected.
    ceiling = xp.where(advantage < 0, math.inf, math.log1p(inputs.clip_high))
    ratio = xp.exp(xp.minimum(log_ratio, xp.where(advantage == 0, 0.0, ceiling)))
    clipped_ratio = clip(ratio, clip_low=inputs.clip_low, clip_high=inputs.clip_high)
    return -xp.minimum(ratio * advantage, clipped_ratio * advantage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A policy term per token, and the aggregation over tokens."""

    term: Callable[[PolicyInputs], Any]
    aggregation: Aggregation
    needs_whole_row: bool = False
    """Whether the term of a token depends on other tokens of its row."""


SURROGATES = {
    "grpo": Surrogate(term=clipped_surrogate, aggregation="sequence_mean"),
    "dr_grpo": Surrogate(term=clipped_surrogate, aggregation="constant"),
    "bnpo": Surrogate(term=clipped_surrogate, aggregation="token_mean"),
    "dapo": Surrogate(term=clipped_surrogate, aggregation="token_mean"),
    "gspo": Surrogate(
        term=clipped_sequence_surrogate, aggregation="sequence_mean", needs_whole_row=True
    ),
    "cispo": Surrogate(term=clipped_weight_surrogate, aggregation="token_mean"),
}
