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
from klinic.maths.surrogate import PolicyInputs, clipped
from klinic.verify.expectation import Drawn, moments
from klinic.verify.targets import targets
from klinic.verify.world import LENGTH, MEMBERS, World, make_world

AGGREGATED = ("unbiased", "exact", "sequence")
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


def aggregation_rows() -> list[AggregationRow]:
    """Return the effect of each aggregation on the offered estimators."""
    world = _unequal_lengths()
    drawn, goals = Drawn.of(world, ratio_cap=math.inf), targets(world)
    weights = {aggregation: pair_weights(drawn, aggregation) for aggregation in AGGREGATIONS}
    return [
        _aggregation_row(drawn, goals, estimator, aggregation, weights[aggregation])
        for estimator in AGGREGATED
        for aggregation in AGGREGATIONS
    ]


def advantage_rows() -> list[AdvantageRow]:
    """Return the effect of each advantage on the policy term, for rewards of 0 and 1."""
    return [
        _advantage_row(name, success_rate) for name in ADVANTAGES for success_rate in SUCCESS_RATES
    ]


def pair_weights(drawn: Drawn, aggregation: Aggregation) -> Float[Tensor, "N"]:
    """Return the aggregation weights when each pair is a step of its own."""
    offsets = drawn.inputs.row_offsets
    weights = [
        aggregation_weights(
            aggregation,
            loss_mask=torch.ones(int(stop - start), dtype=torch.bool),
            row_offsets=offsets[2 * pair : 2 * pair + MEMBERS + 1] - start,
            length=LENGTH,
            dtype=drawn.leaf.dtype,
        )
        for pair, (start, stop) in enumerate(pairwise(offsets[::MEMBERS]))
    ]
    return torch.cat(weights)


def reward_of_completions(world: World) -> Float[Tensor, "B"]:
    """Return a binary reward: 1 for about a third of the completions, else 0."""
    random = torch.Generator().manual_seed(11)
    drawn = torch.rand(world.completions.num_rows, generator=random, dtype=torch.float64)
    return (drawn < 1 / 3).double()


def reward_gradient(world: World, reward: Float[Tensor, "B"]) -> Float[Tensor, "P"]:
    """Return the gradient of the expected reward."""
    theta = world.theta.clone().requires_grad_()
    expected = (world.completion_logp(theta).exp() * reward).sum()
    (gradient,) = torch.autograd.grad(expected, theta)
    return gradient


def policy_gradient(
    drawn: Drawn, reward_of_row: Float[Tensor, "R"], advantage: str
) -> Float[Tensor, "P"]:
    """Return the expected gradient of the policy term, to be minimised."""
    probability = drawn.world.pair_probability
    terms = clipped(
        PolicyInputs(
            advantage=ADVANTAGES[advantage](reward_of_row, drawn.inputs.group),
            row_offsets=drawn.inputs.row_offsets,
            logp=drawn.inputs.logp,
            logp_old=drawn.inputs.logp_old,
            loss_mask=drawn.inputs.loss_mask,
        )
    )
    return drawn.gradient(terms * drawn.weights * probability[drawn.pair])


def rewards_of_rows(reward: Float[Tensor, "B"]) -> Float[Tensor, "R"]:
    """Return the reward of each member of each pair."""
    num = len(reward)
    first, second = reward.repeat_interleave(num), reward.repeat(num)
    return torch.stack([first, second], dim=1).flatten()


def _unequal_lengths() -> World:
    return make_world("eos", seed=3, drift=1.2, ends_early=True)


def _fit(found: Tensor, goal: Tensor) -> tuple[float, float]:
    scale = float(found @ goal / (goal @ goal))
    return scale, float((found - scale * goal).norm() / found.norm())


def _aggregation_row(
    drawn: Drawn, goals: dict[str, Tensor], name: str, aggregation: Aggregation, weights: Tensor
) -> AggregationRow:
    if name == "sequence" and aggregation == "sequence_mean":
        return AggregationRow(
            estimator=name, aggregation=aggregation, refused=True, scale=None, deviation=None
        )
    estimator = ESTIMATORS[name]
    found = moments(drawn, estimator.term, weights=weights).gradient
    scale, deviation = _fit(found, goals[estimator.gradient.value])
    return AggregationRow(
        estimator=name, aggregation=aggregation, refused=False, scale=scale, deviation=deviation
    )


def _advantage_row(name: str, success_rate: float) -> AdvantageRow:
    # E[A S] = (E[A | right] - E[A | wrong]) grad E[reward]: other members are independent of S
    scale = _mean_advantage(name, 1.0, success_rate) - _mean_advantage(name, 0.0, success_rate)
    return AdvantageRow(
        advantage=name, success_rate=success_rate, scale=scale, coefficient=1 / scale
    )


def _mean_advantage(name: str, own_reward: float, success_rate: float) -> float:
    """Return the mean advantage of a completion, over the number of others with reward 1."""
    others = (NUM_GROUPS if name == "batch" else 1) * GROUP_SIZE - 1
    group = np.zeros(others + 1, dtype=np.int64)
    total = 0.0
    for right in range(others + 1):
        reward = np.array([own_reward] + [1.0] * right + [0.0] * (others - right))
        chance = math.comb(others, right) * success_rate**right
        chance *= (1 - success_rate) ** (others - right)
        total += chance * float(ADVANTAGES[name](reward, group)[0])
    return total
