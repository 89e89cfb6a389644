"""`python -m klinic.lab.ablation.coverage`: measures by simulation how often intervals cover.

Draws outcomes with a known mean and counts the 95% intervals of `intervals.mean_interval` that
contain it. Student's t is exact for normal outcomes; the other rows say what it is worth for
skewed outcomes and for accuracies near 1. A difference is paired by seed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from klinic.lab.ablation.intervals import student_quantile

NUM_SEEDS = (3, 5, 10)
NUM_QUESTIONS = 200
CONCENTRATION = 400.0  # of the accuracies of seeds: at 0.8 their standard deviation is 0.02

Draws = np.ndarray
Draw = Callable[[np.random.Generator, tuple[int, int]], Draws]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A distribution of outcomes over seeds, its mean and the step of its grid."""

    name: str
    draw: Draw
    mean: float
    grid: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The fraction of 95% intervals that contain the true mean."""

    outcome: str
    num_seeds: int
    covered: float


def outcomes() -> list[Outcome]:
    """Return the simulated outcomes: normal, skewed and bounded, and differences of them."""
    step = 1 / NUM_QUESTIONS
    means = [
        Outcome(name="normal", draw=lambda g, shape: g.normal(size=shape), mean=0.0),
        *(_lognormal(sigma) for sigma in (0.3, 0.5, 1.0)),
        Outcome(name="exponential", draw=lambda g, shape: g.exponential(size=shape), mean=1.0),
        *(
            Outcome(name=f"accuracy {p:g}", draw=_accuracy(p), mean=p, grid=step)
            for p in (0.8, 0.95, 0.99, 0.995)
        ),
    ]
    by_name = {outcome.name: outcome for outcome in means}
    pairs = (
        ("exponential", "exponential"),
        ("lognormal 1", "lognormal 1"),
        ("lognormal 0.5", "normal"),
        ("exponential", "normal"),
        ("accuracy 0.99", "accuracy 0.99"),
        ("accuracy 0.995", "accuracy 0.995"),
        ("accuracy 0.995", "accuracy 0.8"),
    )
    return means + [_difference(by_name[first], by_name[second]) for first, second in pairs]


def interval_bounds(draws: Draws, grid: float) -> tuple[Draws, Draws]:
    """Return the bounds of `intervals.mean_interval` for every row."""
    num = draws.shape[1]
    spread = np.maximum(draws.std(axis=1, ddof=1), grid / 2)
    half = student_quantile(num - 1) * spread / np.sqrt(num)
    centre = draws.mean(axis=1)
    return centre - half, centre + half


def measure_coverage(outcome: Outcome, num_seeds: int, num_draws: int, seed: int = 0) -> Coverage:
    """Return how often the interval of an outcome contains its mean."""
    rng = np.random.default_rng([seed, num_seeds])
    draws = outcome.draw(rng, (num_draws, num_seeds))
    low, high = interval_bounds(draws, outcome.grid)
    rounding = 1e-12
    inside = (low - rounding <= outcome.mean) & (outcome.mean <= high + rounding)
    return Coverage(outcome=outcome.name, num_seeds=num_seeds, covered=float(inside.mean()))


def start_draws(
    rng: np.random.Generator, num_draws: int, starts: int, seeds: int, start_spread: float
) -> Draws:
    """Return normal differences of seeds within starts, [draw, start, seed], with mean 0.

    The spread of seeds within a start is 1.
    """
    of_starts = start_spread * rng.normal(size=(num_draws, starts, 1))
    return of_starts + rng.normal(size=(num_draws, starts, seeds))


def _lognormal(sigma: float) -> Outcome:
    return Outcome(
        name=f"lognormal {sigma:g}",
        draw=lambda g, shape: g.lognormal(0.0, sigma, shape),
        mean=float(np.exp(sigma**2 / 2)),
    )


def _accuracy(mean: float) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
        true = rng.beta(mean * CONCENTRATION, (1 - mean) * CONCENTRATION, shape)
        fractions: Draws = rng.binomial(NUM_QUESTIONS, true) / NUM_QUESTIONS
        return fractions

    return draw


def _difference(first: Outcome, second: Outcome) -> Outcome:
    return Outcome(
        name=f"{first.name} - {second.name}",
        draw=lambda g, shape: first.draw(g, shape) - second.draw(g, shape),
        mean=first.mean - second.mean,
        grid=min(first.grid, second.grid),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the coverage of every outcome as JSON, one object a line."""
    parser = argparse.ArgumentParser(prog="python -m klinic.lab.ablation.coverage")
    parser.add_argument("--draws", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    for outcome in outcomes():
        for num_seeds in NUM_SEEDS:
            found = measure_coverage(outcome, num_seeds, options.draws)
            sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
