"""Log-probs of the sampled tokens, with a backward pass that allocates no second logits tensor.

The logits of a chunk are the largest tensor. Autograd would allocate two more of that size in the
backward pass; the derivative of a log-softmax at one token, [x = sampled] - p(x), overwrites the
log-probs in place.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def selected_logp(
    logits: Float[Tensor, "n V"], target_ids: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n"]]:
    """Return the log-probs of the full vocabulary, without gradient, and of the sampled tokens.

    The backward pass overwrites the former: copy them to use them afterwards.
    """
    logp_all, logp = _SelectedLogp.apply(logits, target_ids)  # type: ignore[no-untyped-call]
    return logp_all, logp


class _SelectedLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        logp_all = torch.log_softmax(logits, dim=-1)
        ctx.mark_non_differentiable(logp_all)
        ctx.set_materialize_grads(False)  # else zeros of shape (n, V) are allocated
        ctx.save_for_backward(logp_all, target_ids)
        # a copy, not a view: FSDP2 registers its hook on the outputs of a forward
        return logp_all, logp_all.gather(-1, target_ids[:, None])[:, 0].clone()

    @staticmethod
    def backward(ctx: Any, _: None, grad_logp: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_logp is None:
            return None, None
        logp_all, target_ids = ctx.saved_tensors
        grad_logits = logp_all.exp_().mul_(-grad_logp[:, None])
        grad_logits.scatter_add_(-1, target_ids[:, None], grad_logp[:, None])
        return grad_logits, None
