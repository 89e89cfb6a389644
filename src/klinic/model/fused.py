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

from klinic.model.head import Sums
from klinic.model.token_scores import TokenScores, joined_scores

Loss = Callable[[TokenScores, slice], Tensor]
"""Maps the scores of a slice of tokens to their contribution to the loss."""
Score = Callable[[Tensor, slice], TokenScores]
"""Maps the hidden states of a slice of tokens to their scores."""
LEARNT = ("logp", "kl_exact", "kl_topk")
"""The score columns that a loss may be differentiated with respect to."""


def fused(
    hidden: Float[Tensor, "n H"],
    weights: Sequence[Tensor] | Sums,
    score: Score,
    loss: Loss,
    *,
    chunks: Sequence[slice],
    token_by_token: bool,
) -> tuple[TokenScores, Float[Tensor, ""]]:
    """Return the scores, and the loss with a precomputed gradient.

    `weights` are the parameters between hidden states and scores, whose gradient is also computed;
    for a single weight, `score` accumulates it in a `HeadGradient`.
    """
    ahead = _Ahead(hidden, weights)
    if token_by_token:
        parts = [ahead.add(score, loss, tokens) for tokens in chunks]
    else:
        with torch.no_grad():
            parts = [score(hidden[tokens], tokens) for tokens in chunks]
        pulls = ahead.look(joined_scores(parts), loss)
        for tokens in chunks:
            ahead.pull(score, pulls, tokens)
    return joined_scores(parts), ahead.number()


class _Ahead:
    """The accumulated loss and its gradient with respect to hidden states and weights."""

    def __init__(self, hidden: Tensor, weights: Sequence[Tensor] | Sums) -> None:
        self._hidden = hidden
        self._at = hidden.detach()
        self._sums = weights if isinstance(weights, Sums) else None
        self._weights = [] if isinstance(weights, Sums) else list(weights)
        self._value = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        self._of_hidden = torch.zeros_like(self._at)
        self._of_weights: list[Tensor | None] = [None] * len(self._weights)

    def add(self, score: Score, loss: Loss, tokens: slice) -> TokenScores:
        """Add a chunk's loss and its gradient; return the chunk's scores."""
        with torch.enable_grad():
            at = self._at[tokens].requires_grad_()
            scores = score(at, tokens)
            value = loss(scores, tokens)
        self._value += value.detach()
        self._take(tokens, at, [value], None)
        return detached(scores)

    def look(self, scores: TokenScores, loss: Loss) -> dict[str, Tensor]:
        """Compute the loss of all tokens; return its gradient with respect to each score column."""
        leaves = {
            name: column.detach().requires_grad_()
            for name in LEARNT
            if (column := getattr(scores, name)) is not None
        }
        with torch.enable_grad():
            columns: dict[str, Any] = dict(leaves)
            value = loss(replace(scores, **columns), slice(0, len(self._at)))
        self._value += value.detach()
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        return {name: pull for name, pull in pairs if pull is not None}

    def pull(self, score: Score, pulls: dict[str, Tensor], tokens: slice) -> None:
        """Backpropagate the gradient with respect to a chunk's scores."""
        with torch.enable_grad():
            at = self._at[tokens].requires_grad_()
            scores = score(at, tokens)
        columns = [getattr(scores, name) for name in pulls]
        self._take(tokens, at, columns, [pull[tokens] for pull in pulls.values()])

    def _take(
        self, tokens: slice, at: Tensor, outputs: list[Tensor], pulls: list[Tensor] | None
    ) -> None:
        of_at, *others = torch.autograd.grad(
            outputs, [at, *self._weights], grad_outputs=pulls, allow_unused=True
        )
        self._of_hidden[tokens] = of_at
        for place, more in enumerate(others):
            so_far = self._of_weights[place]
            if so_far is None:
                self._of_weights[place] = more
            elif more is not None:
                so_far += more

    def number(self) -> Tensor:
        """Return the loss; its backward pass propagates the gradient to the decoder."""
        weights, of_weights = self._weights, self._of_weights
        if self._sums is not None:
            weights, of_weights = [self._sums.weight], [self._sums.of_weight]
        number: Tensor = _Known.apply(  # type: ignore[no-untyped-call]
            self._value, (self._of_hidden, *of_weights), self._hidden, *weights
        )
        return number


class _Known(torch.autograd.Function):
    """A scalar with a precomputed gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: tuple[Tensor | None, ...], *_: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # in place, and released: a copy of the head's gradient is as large as the head
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a fused loss supports one backward pass")
        if factor.is_cpu and factor == 1:  # the usual case; scaling would touch half a gigabyte
            return (None, None, *gradients)
        scaled = (None if g is None else g.mul_(factor) for g in gradients)
        return (None, None, *scaled)


def detached(scores: TokenScores) -> TokenScores:
    """Return the scores detached from the autograd graph."""
    columns = {
        name: column.detach() for name in LEARNT if (column := getattr(scores, name)) is not None
    }
    return replace(scores, **columns)
