"""Measures the effect of aggregation and advantage scaling on the KL term and its coefficient.

The identities hold for sums. A trainer averages and scales advantages; both change the effective
KL coefficient. Measured on completions of unequal length with one pair per step, where effects of
the batch are strongest.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from klinic.maths.advantage import ADVANTAGES
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.masked import Aggregation, aggregation_weights
from klinic.maths.surrogate import PolicyInputs, clipped_surrogate
from klinic.verify.expectation import EnumeratedPairs, gradient_moments
from klinic.verify.targets import target_gradients
from klinic.verify.toy_policies import COMPLETION_LENGTH, PAIR_SIZE, World, make_world

AGGREGATED_ESTIMATORS = ("unbiased", "exact", "sequence")
GROUP_SIZE, NUM_GROUPS = 8, 8
SUCCESS_RATES = (0.1, 0.5, 0.9)
AGGREGATIONS: tuple[Aggregation, ...] = ("constant", "token_mean", "sequence_mean")


@dataclass(frozen=True, kw_only=True)
class AggregationRow:
    """Effect of one aggregation on the expected gradient of one estimator."""

    estimator: str
    aggregation: str
    refused: bool
    scale: float | None
    """The best-fitting multiple of the promised gradient."""
    deviation: float | None
    """Residual of that fit, relative to the averaged gradient."""


@dataclass(frozen=True, kw_only=True)
class AdvantageRow:
    """Effect of one advantage on the gradient of the expected reward, in groups of eight."""

    advantage: str
    success_rate: float
    """Probability that a completion of the prompt has reward 1."""
    scale: float
    """The policy term is this multiple of the gradient of the expected reward."""
    coefficient: float
    """Effective KL coefficient of a nominal 1 under this advantage: 1 / scale."""


def measure_aggregations() -> list[AggregationRow]:
    """Return the effect of each aggregation on the offered estimators."""
    world = _unequal_length_world()
    pairs, target = EnumeratedPairs.from_world(world), target_gradients(world)
    weights = {aggregation: pair_weights(pairs, aggregation) for aggregation in AGGREGATIONS}
    return [
        _measure_aggregation(pairs, target, estimator, aggregation, weights[aggregation])
        for estimator in AGGREGATED_ESTIMATORS
        for aggregation in AGGREGATIONS
    ]


def measure_advantages() -> list[AdvantageRow]:
    """Return the effect of each advantage on the policy term, for rewards of 0 and 1."""
    return [
        _measure_advantage(name, success_rate)
        for name in ADVANTAGES
        for success_rate in SUCCESS_RATES
    ]


def pair_weights(pairs: EnumeratedPairs, aggregation: Aggregation) -> Float[Tensor, "N"]:
    """Return the aggregation weights when each pair is a step of its own."""
    offsets = pairs.inputs.row_offsets
    weights = [
        aggregation_weights(
            aggregation,
            loss_mask=torch.ones(int(stop - start), dtype=torch.bool),
            row_offsets=offsets[2 * pair : 2 * pair + PAIR_SIZE + 1] - start,
            length=COMPLETION_LENGTH,
            dtype=pairs.leaf_logits.dtype,
        )
        for pair, (start, stop) in enumerate(pairwise(offsets[::PAIR_SIZE]))
    ]
    return torch.cat(weights)


def random_completion_rewards(world: World) -> Float[Tensor, "B"]:
    """Return a binary reward: 1 for about a third of the completions, else 0."""
    rng = torch.Generator().manual_seed(11)
    uniform = torch.rand(world.completions.num_rows, generator=rng, dtype=torch.float64)
    return (uniform < 1 / 3).double()


def reward_gradient(world: World, reward: Float[Tensor, "B"]) -> Float[Tensor, "P"]:
    """Return the gradient of the expected reward."""
    theta = world.theta.clone().requires_grad_()
    expected = (world.completion_logp(theta).exp() * reward).sum()
    (gradient,) = torch.autograd.grad(expected, theta)
    return gradient


def policy_gradient(
    pairs: EnumeratedPairs, reward_of_row: Float[Tensor, "R"], advantage: str
) -> Float[Tensor, "P"]:
    """Return the expected gradient of the policy term, to be minimised."""
    probability = pairs.world.pair_probability
    terms = clipped_surrogate(
        PolicyInputs(
            advantage=ADVANTAGES[advantage](reward_of_row, pairs.inputs.group),
            row_offsets=pairs.inputs.row_offsets,
            logp=pairs.inputs.logp,
            logp_old=pairs.inputs.logp_old,
            loss_mask=pairs.inputs.loss_mask,
        )
    )
    return pairs.total_gradient(terms * pairs.weights * probability[pairs.pair_of_token])


def pair_rewards(reward: Float[Tensor, "B"]) -> Float[Tensor, "R"]:
    """Return the reward of each member of each pair."""
    num = len(reward)
    first, second = reward.repeat_interleave(num), reward.repeat(num)
    return torch.stack([first, second], dim=1).flatten()


def _unequal_length_world() -> World:
    return make_world("eos", seed=3, drift=1.2, ends_early=True)


def _fit_multiple(gradient: Tensor, target: Tensor) -> tuple[float, float]:
    scale = float(gradient @ target / (target @ target))
    return scale, float((gradient - scale * target).norm() / gradient.norm())


def _measure_aggregation(
    pairs: EnumeratedPairs,
    target: dict[str, Tensor],
    name: str,
    aggregation: Aggregation,
    weights: Tensor,
) -> AggregationRow:
    if name == "sequence" and aggregation == "sequence_mean":
        return AggregationRow(
            estimator=name, aggregation=aggregation, refused=True, scale=None, deviation=None
        )
    estimator = ESTIMATORS[name]
    gradient = gradient_moments(pairs, estimator.term, weights=weights).gradient
    scale, deviation = _fit_multiple(gradient, target[estimator.gradient.value])
    return AggregationRow(
        estimator=name, aggregation=aggregation, refused=False, scale=scale, deviation=deviation
    )


def _measure_advantage(name: str, success_rate: float) -> AdvantageRow:
    # E[A S] = (E[A | right] - E[A | wrong]) grad E[reward]: other members are independent of S
    scale = _mean_advantage(name, 1.0, success_rate) - _mean_advantage(name, 0.0, success_rate)
    return AdvantageRow(
        advantage=name, success_rate=success_rate, scale=scale, coefficient=1 / scale
    )


def _mean_advantage(name: str, own_reward: float, success_rate: float) -> float:
    """Return the mean advantage of a completion, over the number of others with reward 1."""
    num_others = (NUM_GROUPS if name == "batch" else 1) * GROUP_SIZE - 1
    group = np.zeros(num_others + 1, dtype=np.int64)
    total = 0.0
    for num_right in range(num_others + 1):
        reward = np.array([own_reward] + [1.0] * num_right + [0.0] * (num_others - num_right))
        probability = math.comb(num_others, num_right) * success_rate**num_right
        probability *= (1 - success_rate) ** (num_others - num_right)
        total += probability * float(ADVANTAGES[name](reward, group)[0])
    return total
