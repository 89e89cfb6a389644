"""Evaluates a user's function on rows of chosen log-probs, with its pull on every token.

The pull on a token is the derivative of the function's total in that token's logp. A function of
logits and tokens sees a vocabulary of two: the sampled token and the rest.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.verify.loading import UserFunction

PARTNER_LOGP, PARTNER_K1 = -1.2, 0.4

Rows = Float[Tensor, "B L"]


@dataclass(frozen=True, kw_only=True)
class RowPulls:
    """Values of a function on rows, and its pull on every token."""

    value: Tensor
    """[B, L] or [B]."""
    pull: Rows


def evaluate_rows(
    function: UserFunction, logp: Rows, logp_ref: Rows, logp_old: Rows | None = None
) -> Tensor:
    """Return the values of a function; without `logp_old` the rows are on policy."""
    arrays = {
        "logp": logp,
        "logp_ref": logp_ref,
        "logp_old": logp.detach() if logp_old is None else logp_old,
    }
    if function.takes_logits:
        arrays |= {"logits": _two_token_logits(logp), "logits_ref": _two_token_logits(logp_ref)}
    return function(arrays)


def evaluate_pulls(
    function: UserFunction, logp: Rows, logp_ref: Rows, logp_old: Rows | None = None
) -> RowPulls:
    """Return values and pulls of a function on rows."""
    logp = logp.detach().clone().requires_grad_()
    value = evaluate_rows(function, logp, logp_ref, logp_old)
    return RowPulls(value=value.detach(), pull=derivative(value, logp))


def evaluate_masked_pulls(function: UserFunction, logp: Rows, logp_ref: Rows, mask: Tensor) -> Rows:
    """Return the pulls of the values that a trainer keeps: those of unmasked tokens."""
    logp = logp.detach().clone().requires_grad_()
    arrays = {"logp": logp, "logp_ref": logp_ref, "logp_old": logp.detach(), "mask": mask}
    if function.takes_logits:
        arrays |= {"logits": _two_token_logits(logp), "logits_ref": _two_token_logits(logp_ref)}
    value = function(arrays)
    return derivative(value if value.ndim == 1 else value[mask], logp)


def evaluate_pulls_in_pairs(function: UserFunction, logp: Rows, logp_ref: Rows) -> RowPulls:
    """Return the same for a function that mixes a batch: every row is called with one partner."""
    partner = torch.full_like(logp[:1], PARTNER_LOGP)
    partner_ref = partner - PARTNER_K1
    pairs = [
        evaluate_pulls(function, torch.cat([row, partner]), torch.cat([row_ref, partner_ref]))
        for row, row_ref in zip(logp[:, None], logp_ref[:, None], strict=True)
    ]
    return RowPulls(
        value=torch.stack([pair.value[0] for pair in pairs]),
        pull=torch.stack([pair.pull[0] for pair in pairs]),
    )


def derivative(value: Tensor, leaf: Tensor) -> Tensor:
    """Return the derivative of the sum of the values; zero if they do not depend on the leaf."""
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def _two_token_logits(logp: Tensor) -> Tensor:
    """Return the log-probs of the token and of everything else; they are normalised logits."""
    return torch.stack([logp, (-torch.expm1(logp)).log()], dim=-1)
