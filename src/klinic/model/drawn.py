"""The log-probs of outcomes that were drawn, whose gradient takes no memory of its own.

Logits of a chunk are the largest thing there is. Autograd would make two more of their size in the
backward pass; the derivative of a log-softmax at one outcome, [x = drawn] - p(x), fits where the
log-probs are.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def drawn_logp(
    logits: Float[Tensor, "n V"], target_ids: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n"]]:
    """Return log-probs of all outcomes, without a gradient, and of those that were drawn.

    The first are overwritten by the backward pass: whoever needs them later takes a copy.
    """
    logp_all, logp = _Drawn.apply(logits, target_ids)  # type: ignore[no-untyped-call]
    return logp_all, logp


class _Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        logp_all = torch.log_softmax(logits, dim=-1)
        ctx.mark_non_differentiable(logp_all)
        ctx.set_materialize_grads(False)  # of all outcomes it would be zeros of their size
        ctx.save_for_backward(logp_all, target_ids)
        # a copy, no view: FSDP2 hangs its hook on what a forward returns
        return logp_all, logp_all.gather(-1, target_ids[:, None])[:, 0].clone()

    @staticmethod
    def backward(ctx: Any, _: None, of_logp: Tensor | None) -> tuple[Tensor | None, None]:
        if of_logp is None:
            return None, None
        logp_all, target_ids = ctx.saved_tensors
        of_logits = logp_all.exp_().mul_(-of_logp[:, None])
        of_logits.scatter_add_(-1, target_ids[:, None], of_logp[:, None])
        return of_logits, None
