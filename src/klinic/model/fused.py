"""Compute a loss over tokens and its gradient chunk by chunk, inside the forward pass.

    hidden states -> [logits -> log-probs -> loss -> gradient of the chunk] -> next chunk

The logits of a chunk are freed before the next chunk's are computed, and none are computed twice.
Autograd differentiates the given loss, so no formula is duplicated here. A loss that couples tokens
needs the log-probs of all of them first, which costs one more pass through the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.model.head import AddGradient, HeadGradient
from klinic.model.token_scores import TokenScores, concat_scores

ChunkLoss = Callable[[TokenScores, slice], Tensor]
"""Maps the scores of a slice of tokens to their contribution to the loss."""
ChunkScore = Callable[[Tensor, slice], TokenScores]
"""Maps the hidden states of a slice of tokens to their scores."""
DIFFERENTIABLE_COLUMNS = ("logp", "kl_exact", "kl_topk", "teacher_kl_exact", "teacher_kl_topk")
"""The score columns that a loss may be differentiated with respect to."""


def fused_loss(
    hidden: Float[Tensor, "n H"],
    weights: Sequence[Tensor] | HeadGradient,
    score: ChunkScore,
    loss: ChunkLoss,
    *,
    chunks: Sequence[slice],
    token_by_token: bool,
) -> tuple[TokenScores, Float[Tensor, ""]]:
    """Return the scores, and the loss with a precomputed gradient.

    `weights` are the parameters between hidden states and scores, whose gradient is also computed;
    for a single weight, `score` accumulates it in a `HeadGradient`.
    """
    accumulator = _ChunkedBackward(hidden, weights)
    if token_by_token:
        chunk_scores = [accumulator.add_chunk(score, loss, tokens) for tokens in chunks]
    else:
        with torch.no_grad():
            chunk_scores = [score(hidden[tokens], tokens) for tokens in chunks]
        score_grads = accumulator.loss_gradients(concat_scores(chunk_scores), loss)
        for tokens in chunks:
            accumulator.backprop_chunk(score, score_grads, tokens)
    return concat_scores(chunk_scores), accumulator.loss_with_gradient()


class _ChunkedBackward:
    """The accumulated loss and its gradient with respect to hidden states and weights."""

    def __init__(self, hidden: Tensor, weights: Sequence[Tensor] | HeadGradient) -> None:
        self._hidden = hidden
        self._detached_hidden = hidden.detach()
        self._head_gradient = weights if isinstance(weights, HeadGradient) else None
        self._weights = [] if isinstance(weights, HeadGradient) else list(weights)
        self._value = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        self._grad_hidden = torch.zeros_like(self._detached_hidden)
        self._grad_weights: list[Tensor | None] = [None] * len(self._weights)

    def add_chunk(self, score: ChunkScore, loss: ChunkLoss, tokens: slice) -> TokenScores:
        """Add a chunk's loss and its gradient; return the chunk's scores."""
        with torch.enable_grad():
            chunk_hidden = self._detached_hidden[tokens].requires_grad_()
            scores = score(chunk_hidden, tokens)
            value = loss(scores, tokens)
        self._value += value.detach()
        self._accumulate_gradients(tokens, chunk_hidden, [value], None)
        return detach_scores(scores)

    def loss_gradients(self, scores: TokenScores, loss: ChunkLoss) -> dict[str, Tensor]:
        """Compute the loss of all tokens; return its gradient with respect to each score column."""
        leaves = {
            name: column.detach().requires_grad_()
            for name in DIFFERENTIABLE_COLUMNS
            if (column := getattr(scores, name)) is not None
        }
        with torch.enable_grad():
            columns: dict[str, Any] = dict(leaves)
            value = loss(replace(scores, **columns), slice(0, len(self._detached_hidden)))
        self._value += value.detach()
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves, gradients, strict=True)
        return {name: grad for name, grad in pairs if grad is not None}

    def backprop_chunk(
        self, score: ChunkScore, score_grads: dict[str, Tensor], tokens: slice
    ) -> None:
        """Backpropagate the gradient with respect to a chunk's scores."""
        with torch.enable_grad():
            chunk_hidden = self._detached_hidden[tokens].requires_grad_()
            scores = score(chunk_hidden, tokens)
        columns = [getattr(scores, name) for name in score_grads]
        self._accumulate_gradients(
            tokens, chunk_hidden, columns, [grad[tokens] for grad in score_grads.values()]
        )

    def _accumulate_gradients(
        self,
        tokens: slice,
        chunk_hidden: Tensor,
        outputs: list[Tensor],
        score_grads: list[Tensor] | None,
    ) -> None:
        grad_chunk, *weight_grads = torch.autograd.grad(
            outputs, [chunk_hidden, *self._weights], grad_outputs=score_grads, allow_unused=True
        )
        self._grad_hidden[tokens] = grad_chunk
        for index, grad in enumerate(weight_grads):
            accumulated = self._grad_weights[index]
            if accumulated is None:
                self._grad_weights[index] = grad
            elif grad is not None:
                accumulated += grad

    def loss_with_gradient(self) -> Tensor:
        """Return the loss; its backward pass propagates the gradient to the decoder."""
        weights, grad_weights = self._weights, self._grad_weights
        add_gradient = None
        if (head := self._head_gradient) is not None:
            weights, grad_weights, add_gradient = [head.weight], [head.grad], head.add_gradient
        loss: Tensor = _PrecomputedGradient.apply(  # type: ignore[no-untyped-call]
            self._value,
            (self._grad_hidden, *grad_weights),
            add_gradient,
            self._hidden,
            *weights,
        )
        return loss


class _PrecomputedGradient(torch.autograd.Function):
    """A scalar with a precomputed gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        gradients: tuple[Tensor | None, ...],
        add_gradient: AddGradient | None,
        *_: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.add_gradient = gradients, add_gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # in place, and released: a copy of the head's gradient is as large as the head
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a fused loss supports one backward pass")
        if not (factor.is_cpu and factor == 1):  # usually 1; scaling would touch half a gigabyte
            gradients = tuple(None if g is None else g.mul_(factor) for g in gradients)
        if ctx.add_gradient is not None:
            hidden_gradient, head_gradient = gradients
            ctx.add_gradient(head_gradient)
            gradients = (hidden_gradient, None)
        return (None, None, None, *gradients)


def detach_scores(scores: TokenScores) -> TokenScores:
    """Return the scores detached from the autograd graph."""
    columns = {
        name: column.detach()
        for name in DIFFERENTIABLE_COLUMNS
        if (column := getattr(scores, name)) is not None
    }
    return replace(scores, **columns)
