"""Bias, direction and noise of an estimator over many random worlds, not in one.

How far the token-level gradient is from that of the KL between completions depends on the policy:
on how much a token decides about the KL of later ones, and on how parameters are shared. One world
shows one number, so the quantities are measured in worlds of four families and reported as ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from klinic.verify.expectation import GradientMoments
from klinic.verify.toy_policies import World, make_world

NUM_SEEDS = 12  # worlds of each family
FIRST_SEED = 100
DRIFT = 1.0  # standard deviation of the change of logits from the reference


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, 5% and 95% quantile of a quantity over worlds."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, kw_only=True)
class WorldRange:
    """An expected gradient against that of the KL between completions, over random worlds."""

    bias: Spread
    """Norm of the difference, relative to the gradient of the KL between completions."""
    cosine: Spread
    opposed: float
    """Fraction of worlds in which it points away: the cosine is negative."""
    variance: Spread
    """Of one completion's gradient, relative to the square of the same gradient."""


def random_worlds() -> list[World]:
    """Return on-policy worlds: tabular or with shared parameters, with and without early ends."""
    return [
        make_world(f"random {seed}", seed=seed, drift=DRIFT, shared=shared, ends_early=ends_early)
        for family, (shared, ends_early) in enumerate(
            (shared, ends_early) for shared in (False, True) for ends_early in (False, True)
        )
        for seed in range(FIRST_SEED + family * NUM_SEEDS, FIRST_SEED + (family + 1) * NUM_SEEDS)
    ]


def measure_range(
    moments: Sequence[GradientMoments], sequence_gradients: Sequence[Tensor]
) -> WorldRange:
    """Return the ranges of an estimator, given its moments in every world."""
    biases, cosines, variances = [], [], []
    for moment, target in zip(moments, sequence_gradients, strict=True):
        square = float(target @ target)
        norms = float(moment.gradient.norm()) * square**0.5
        biases.append(float((moment.gradient - target).norm()) / square**0.5)
        # a gradient of zero has no direction
        cosines.append(float(moment.gradient @ target) / norms if norms > 1e-9 * square else 0.0)
        variances.append(moment.variance / square)
    return WorldRange(
        bias=_spread(biases),
        cosine=_spread(cosines),
        opposed=float(np.mean(np.array(cosines) < 0)),
        variance=_spread(variances),
    )


def _spread(values: Sequence[float]) -> Spread:
    low, median, high = np.quantile(values, [0.05, 0.5, 0.95]).tolist()
    return Spread(low=low, median=median, high=high)
