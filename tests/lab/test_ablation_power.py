"""Power by formula agrees with simulation and with published tables."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from klinic.lab.ablation.intervals import student_quantile
from klinic.lab.ablation.power import (
    difference_power,
    equivalence_power,
    num_needed,
    smallest_difference,
    spread_limit,
    spread_of_starts,
)

STUDY = Path(__file__).parents[2] / "docs" / "studies" / "coefficient"
NUM_DRAWS = 40_000


@pytest.mark.parametrize("num", [3, 5, 10])
@pytest.mark.parametrize("level", [0.05, 0.01])
def test_the_power_is_that_of_simulated_studies(num, level):
    draws = np.random.default_rng(num).normal(1.5, 1.0, size=(NUM_DRAWS, num))
    error = draws.std(axis=1, ddof=1) / np.sqrt(num)
    found = np.abs(draws.mean(axis=1)) > student_quantile(num - 1, 1 - level) * error
    assert difference_power(1.5, spread=1.0, num=num, level=level) == pytest.approx(
        found.mean(), abs=0.01
    )
    near = np.abs(draws.mean(axis=1) - 1.5) + student_quantile(num - 1, 1 - 2 * level) * error < 2.0
    assert equivalence_power(2.0, spread=1.0, num=num, level=level) == pytest.approx(
        near.mean(), abs=0.01
    )


@pytest.mark.parametrize(("effect", "num"), [(0.5, 34), (0.8, 15), (1.0, 10)])
def test_numbers_of_pairs_are_those_of_published_tables(effect, num):
    """G*Power: two-sided paired t tests at 5% and 80%."""
    assert num_needed(effect, spread=1.0) == num


def test_what_is_just_seen_has_a_power_of_80_percent():
    seen = smallest_difference(spread=0.02, num=5, level=0.01)
    assert difference_power(seen, spread=0.02, num=5, level=0.01) == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize("degrees", [2, 4, 9])
def test_the_limit_of_a_spread_holds_in_80_percent_of_pilots(degrees):
    spreads = np.random.default_rng(0).normal(size=(NUM_DRAWS, degrees + 1)).std(axis=1, ddof=1)
    assert (spreads * spread_limit(1.0, degrees) > 1).mean() == pytest.approx(0.8, abs=0.01)


def test_a_start_for_each_seed_is_the_strongest_design():
    """Thirty runs of a setting; spread of starts and of seeds alike."""
    powers = [
        difference_power(1.0, spread=spread_of_starts(1.0, 1.0, 30 // starts), num=starts)
        for starts in (3, 10, 30)
    ]
    assert powers == sorted(powers)
    assert powers[0] < 0.3
    assert powers[2] > 0.9


def test_the_command_prints_the_seeds_that_a_pilot_asks_for():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "klinic.cli", "ablate", STUDY, "--detect", "0.02"),
            *("--outcome", "accuracy", "--margin", "0.02", "--json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    (row,) = json.loads(done.stdout)["power"]
    assert row["measure"] == "accuracy"
    assert row["num"] == num_needed(0.02, spread=row["spread"], level=0.05 / 4)
    assert row["num"] < row["num_at_limit"] < row["num_for_equivalence"] + 10
