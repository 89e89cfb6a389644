"""A loss over tokens whose gradient is taken chunk by chunk, inside the forward pass.

    hidden states -> [logits -> log-probs -> loss -> gradient of the chunk] -> next chunk

Logits of a chunk are gone before those of the next are made, and none are made twice. The gradient
is what autograd makes of the loss it is given: there is no second copy of any formula. A loss in
which tokens look at each other first needs the log-probs of all of them, which is one more pass
through the head.
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
"""From the scores of some neighbouring tokens to their part of the sum that is minimised."""
Score = Callable[[Tensor, slice], TokenScores]
"""From the hidden states of some neighbouring tokens to their scores."""
LEARNT = ("logp", "kl_exact", "kl_topk")
"""The columns that a loss may have a gradient in."""


def fused(
    hidden: Float[Tensor, "n H"],
    weights: Sequence[Tensor] | Sums,
    score: Score,
    loss: Loss,
    *,
    chunks: Sequence[slice],
    token_by_token: bool,
) -> tuple[TokenScores, Float[Tensor, ""]]:
    """Return the scores, and the loss as a number that knows its gradient already.

    `weights` are the parameters between hidden states and scores; their gradient is taken too, or
    where there is only one, `score` adds it up.
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
    """The sum so far, and its gradient in hidden states and weights."""

    def __init__(self, hidden: Tensor, weights: Sequence[Tensor] | Sums) -> None:
        self._hidden = hidden
        self._at = hidden.detach()
        self._sums = weights if isinstance(weights, Sums) else None
        self._weights = [] if isinstance(weights, Sums) else list(weights)
        self._value = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        self._of_hidden = torch.zeros_like(self._at)
        self._of_weights: list[Tensor | None] = [None] * len(self._weights)

    def add(self, score: Score, loss: Loss, tokens: slice) -> TokenScores:
        """Add the loss of a chunk, and its gradient."""
        with torch.enable_grad():
            at = self._at[tokens].requires_grad_()
            scores = score(at, tokens)
            value = loss(scores, tokens)
        self._value += value.detach()
        self._take(tokens, at, [value], None)
        return detached(scores)

    def look(self, scores: TokenScores, loss: Loss) -> dict[str, Tensor]:
        """Take the loss of all tokens; return its gradient in each column of the scores."""
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
        """Add the gradient of a chunk whose loss is known."""
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
        """Return the sum; its backward pass hands the gradient on to the decoder."""
        weights, of_weights = self._weights, self._of_weights
        if self._sums is not None:
            weights, of_weights = [self._sums.weight], [self._sums.of_weight]
        number: Tensor = _Known.apply(  # type: ignore[no-untyped-call]
            self._value, (self._of_hidden, *of_weights), self._hidden, *weights
        )
        return number


class _Known(torch.autograd.Function):
    """A number whose gradient is known."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: tuple[Tensor | None, ...], *_: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # in place, and given away: a copy of the head's gradient would be as large as the head
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradient of a fused loss can be used once")
        if factor.is_cpu and factor == 1:  # the rule, and the head's is half a gigabyte to walk
            return (None, None, *gradients)
        scaled = (None if g is None else g.mul_(factor) for g in gradients)
        return (None, None, *scaled)


def detached(scores: TokenScores) -> TokenScores:
    """Return the scores without their graph."""
    columns = {
        name: column.detach() for name in LEARNT if (column := getattr(scores, name)) is not None
    }
    return replace(scores, **columns)
