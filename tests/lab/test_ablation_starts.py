"""Starts are clusters: seeds of one start are not independent of one another."""

from pathlib import Path

import numpy as np
import pytest

from klinic.errors import ConfigError
from klinic.lab.ablation.comparison import Question, setting_rows
from klinic.lab.ablation.coverage import interval_bounds, start_draws
from klinic.lab.ablation.plan import make_plan, open_ablation, read_plan
from klinic.lab.ablation.starts import independent_values
from klinic.lab.ablation.verdict import recommend_setting

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
COEFS = ["kl.coef=0,0.1"]
NUM_DRAWS = 20_000


@pytest.mark.parametrize("starts", [3, 5, 10])
@pytest.mark.parametrize("start_spread", [0.0, 1.0])
def test_intervals_over_starts_cover_and_those_over_pooled_seeds_do_not(starts, start_spread):
    rng = np.random.default_rng(starts)
    draws = start_draws(rng, NUM_DRAWS, starts, 4, start_spread)
    low, high = interval_bounds(draws.mean(axis=2), 0.0)
    assert ((low <= 0) & (high >= 0)).mean() == pytest.approx(0.95, abs=0.01)
    low, high = interval_bounds(draws.reshape(NUM_DRAWS, -1), 0.0)
    pooled = ((low <= 0) & (high >= 0)).mean()
    assert pooled < 0.8 if start_spread else pooled > 0.94


def test_the_printed_interval_is_the_one_over_starts():
    rng = np.random.default_rng(1)
    draws = start_draws(rng, 1, 3, 2, 1.0)[0]
    keys = [(f"s{i}", 2 * i + j) for i in range(3) for j in range(2)]
    values = dict(zip(keys, draws.ravel().tolist(), strict=True))
    assert independent_values(values) == pytest.approx(draws.mean(axis=1))
    results = [
        {"setting": setting, "start": start, "seed": seed, "accuracy": value * scale}
        for setting, scale in (("a", 0.0), ("b", 1.0))
        for (start, seed), value in values.items()
    ]
    _, row = setting_rows(results, ["a", "b"], "a", Question(outcome="accuracy"))
    ((low,), (high,)) = interval_bounds(draws.mean(axis=1)[None], 0.0)
    assert row.differences["accuracy"].num == 3
    assert (row.differences["accuracy"].low, row.differences["accuracy"].high) == (
        pytest.approx(low),
        pytest.approx(high),
    )


def test_many_seeds_of_two_starts_are_no_many_values():
    """Ten seeds a start agree within each start; the starts differ, so nothing is proved."""
    results = [
        {"setting": s, "start": start, "seed": seed, "accuracy": 0.5 + shift * (s == "b")}
        for s in ("a", "b")
        for start, seeds, shift in (("x", range(10), 0.05), ("y", range(10, 20), 0.2))
        for seed in seeds
    ]
    question = Question(outcome="accuracy")
    verdict = recommend_setting(
        setting_rows(results, ["a", "b"], "a", question), "accuracy", question
    )
    assert verdict.decisions == {"b": "undecided"}


def test_each_start_has_seeds_of_its_own(tmp_path):
    plan = make_plan(RECIPE, [], COEFS, 2, "warm_start.seed=0,1,2")
    trials = plan.trials()
    assert len(trials) == len({trial.folder for trial in trials}) == 12
    assert {trial.seed for trial in trials if trial.start == "warm_start.seed=1"} == {3, 4}
    open_ablation(tmp_path / "here", plan)
    assert read_plan(tmp_path / "here") == plan


def test_a_key_is_varied_or_names_starts():
    with pytest.raises(ConfigError, match=r"kl\.coef is varied"):
        make_plan(RECIPE, [], COEFS, 2, "kl.coef=1,2")
    with pytest.raises(ConfigError, match="2 of 4 settings"):
        make_plan(RECIPE, [], COEFS, 2, "warm_start.seed=0,-1")
