"""Exact mean and variance of a term's gradient over all pairs of completions.

The logits of every token are separate autograd leaves, so one backward pass yields the gradient of
each pair; the features of the world map it to the parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.maths import kl
from klinic.maths.importance import ImportanceSampling
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.masked import constant
from klinic.verify.targets import TOP_K
from klinic.verify.toy_policies import PAIR_SIZE, World

Term = Callable[[KLInputs], Tensor]
UNCAPPED = ImportanceSampling(cap=math.inf)


@dataclass(frozen=True, kw_only=True)
class EnumeratedPairs:
    """Every pair of a world, as inputs of the KL term of a training step."""

    world: World
    leaf_logits: Float[Tensor, "N V"]
    """The logits at each token, with gradient."""
    inputs: KLInputs
    pair_of_token: Tensor
    """The pair of each token."""
    weights: Float[Tensor, "N"]
    """Per pair: sum over tokens, mean over its two members."""

    @classmethod
    def from_world(
        cls, world: World, *, importance_sampling: ImportanceSampling = UNCAPPED
    ) -> "EnumeratedPairs":
        """Enumerate the pairs of a world and score them under policy, sampler and reference."""
        pairs = world.completion_pairs
        leaf_logits = world.prefix_logits(world.theta)[pairs.state].requires_grad_()
        rows, rows_ref = (
            leaf_logits.log_softmax(-1),
            world.prefix_log_probs(world.theta_ref)[pairs.state],
        )
        logp_sampler = world.prefix_log_probs(world.theta_sampler)[pairs.state, pairs.token]
        group = torch.arange(pairs.num_rows) // PAIR_SIZE
        inputs = KLInputs(
            group=group,
            row_offsets=pairs.row_offsets,
            logp=rows.gather(-1, pairs.token[:, None])[:, 0],
            logp_old=logp_sampler,
            logp_sampler=logp_sampler,
            logp_ref=rows_ref.gather(-1, pairs.token[:, None])[:, 0],
            loss_mask=torch.ones(len(pairs.token), dtype=torch.bool),
            kl_exact=kl.exact(logp_p=rows, logp_q=rows_ref),
            kl_topk=kl.topk(logp_p=rows, logp_q=rows_ref, k=TOP_K),
            importance_sampling=importance_sampling,
        )
        # constant() divides by all rows, but a step here is one pair
        weights = constant(inputs.loss_mask, pairs.row_offsets, length=1, dtype=leaf_logits.dtype)
        weights = weights * (pairs.num_rows / PAIR_SIZE)
        return cls(
            world=world,
            leaf_logits=leaf_logits,
            inputs=inputs,
            pair_of_token=group[pairs.row_of_token],
            weights=weights,
        )

    @property
    def mean_log_ratio(self) -> float:
        """Mean of |log policy - log sampler| per token of the sampler, in nats."""
        log_ratio = (self.inputs.logp - self.inputs.logp_sampler).detach().abs()
        probability = self.world.pair_probability[self.pair_of_token]
        return float((probability * log_ratio).sum() / probability.sum())

    def pair_gradients(self, loss_per_token: Float[Tensor, "N"]) -> Float[Tensor, "G P"]:
        """Return the parameter gradient of each pair."""
        return self._parameter_gradients(
            loss_per_token, self.pair_of_token, len(self.world.pair_probability)
        )

    def total_gradient(self, loss_per_token: Float[Tensor, "N"]) -> Float[Tensor, "P"]:
        """Return the parameter gradient of the sum over all tokens."""
        return self._parameter_gradients(loss_per_token, torch.zeros_like(self.pair_of_token), 1)[0]

    def _parameter_gradients(
        self, loss_per_token: Tensor, segment: Tensor, num_segments: int
    ) -> Tensor:
        (by_token,) = torch.autograd.grad(loss_per_token.sum(), self.leaf_logits, retain_graph=True)
        num_states, num_tokens = self.world.base.shape
        by_prefix = torch.zeros(num_segments * num_states, num_tokens, dtype=by_token.dtype)
        by_prefix.index_add_(0, segment * num_states + self.world.completion_pairs.state, by_token)
        return by_prefix.view(num_segments, -1) @ self.world.features


@dataclass(frozen=True, kw_only=True)
class GradientMoments:
    """Mean gradient, gradient variance and mean value of a term."""

    gradient: Float[Tensor, "P"]
    variance: float
    """Trace of the covariance of one completion's gradient."""
    value: float

    @property
    def gradient_rms(self) -> float:
        """Root mean square of a pair's gradient norm."""
        return math.sqrt(self.variance / PAIR_SIZE + float(self.gradient @ self.gradient))


def gradient_moments(
    pairs: EnumeratedPairs, term: Term, *, weights: Float[Tensor, "N"] | None = None
) -> GradientMoments:
    """Return mean gradient, variance and mean value of a term over all pairs."""
    probability = pairs.world.pair_probability
    terms = term(pairs.inputs) * (pairs.weights if weights is None else weights)
    per_pair = pairs.pair_gradients(terms)
    # a second pass with the probabilities inside: correct even if a term mixed pairs
    mean = pairs.total_gradient(terms * probability[pairs.pair_of_token])
    squared_deviation = ((per_pair - mean) ** 2).sum(-1)
    return GradientMoments(
        gradient=mean,
        variance=float((probability * squared_deviation).sum()) * PAIR_SIZE,
        value=float((probability[pairs.pair_of_token] * terms.detach()).sum()),
    )


def mean_gradient(pairs: EnumeratedPairs, term: Term) -> Float[Tensor, "P"]:
    """Return the mean gradient of a term over all pairs."""
    probability = pairs.world.pair_probability[pairs.pair_of_token]
    return pairs.total_gradient(term(pairs.inputs) * pairs.weights * probability)
