"""What an ablation runs is decided, checked and kept before anything is run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError, EvidenceError
from klinic.lab.ablation.plan import (
    Setting,
    Trial,
    make_plan,
    open_ablation,
    parse_vary,
    read_plan,
)

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
COEFS = ["kl.coef=0,0.01"]


def test_every_combination_is_run_on_the_same_seeds():
    plan = make_plan(RECIPE, [], ["kl.coef=0,0.01", "kl.estimator=unbiased,k3"], 2)
    assert [setting.name for setting in plan.settings()] == [
        "kl.coef=0 kl.estimator=unbiased",
        "kl.coef=0 kl.estimator=k3",
        "kl.coef=0.01 kl.estimator=unbiased",
        "kl.coef=0.01 kl.estimator=k3",
    ]
    seeds = [trial.seed for trial in plan.trials()]
    assert seeds == [1] * 4 + [2] * 4  # one seed of all before a second of any


def test_all_settings_that_cannot_be_are_named_before_anything_is_run():
    with pytest.raises(ConfigError) as error:
        make_plan(RECIPE, [], ["kl.coef=0,-1", "kl.estimator=unbiased,k4"], 1)
    said = str(error.value)
    assert "3 of 4 settings are not valid" in said
    assert "kl.coef=-1 kl.estimator=unbiased: " in said
    assert "a negative one rewards leaving the reference" in said


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "nothing is varied"),
        (["kl.coef"], "write a key and distinct values"),
        (["kl.coef=0,,1"], "write a key and distinct values"),
        (["kl.coef=0,0"], "write a key and distinct values"),
        (["seed=1,2"], "use --seeds for seeds"),
        (["kl.coef=0,1", "kl_beta=2,3"], "cannot be varied"),
    ],
)
def test_what_cannot_be_varied_is_refused(texts, said):
    with pytest.raises(ConfigError, match=said):
        parse_vary(texts)


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_value_leads_out_of_the_folder(key, value):
    trial = Trial(setting=Setting(values=((key, value),)), seed=1)
    inside = (Path("/ablation") / trial.folder).resolve()
    assert inside.is_relative_to("/ablation")
    assert inside.name == "seed-1"


def test_a_folder_goes_on_with_the_same_plan_alone(tmp_path):
    plan = make_plan(RECIPE, ["loop.max_steps=3"], COEFS, 2)
    open_ablation(tmp_path / "here", plan)
    open_ablation(tmp_path / "here", plan)
    assert read_plan(tmp_path / "here") == plan
    for other in (
        make_plan(RECIPE, ["loop.max_steps=3"], COEFS, 3),
        make_plan(RECIPE, ["loop.max_steps=4"], COEFS, 2),
        make_plan(RECIPE, ["loop.max_steps=3"], ["kl.coef=0,0.1"], 2),
    ):
        assert other.digest != plan.digest
        with pytest.raises(ConfigError, match="holds another ablation"):
            open_ablation(tmp_path / "here", other)


def test_somebody_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="is not empty and holds no ablation"):
        open_ablation(tmp_path, make_plan(RECIPE, [], COEFS, 1))


def test_an_ablation_that_goes_on_runs_the_recipe_of_the_command(tmp_path):
    plan = make_plan(RECIPE, [], COEFS, 1)
    open_ablation(tmp_path / "here", plan)
    (tmp_path / "here" / "recipe.yaml").write_text("rewards: [evil.py:reward]\n")
    open_ablation(tmp_path / "here", plan)
    assert (tmp_path / "here" / "recipe.yaml").read_text() == plan.recipe


def test_an_ablation_with_a_link_out_of_it_does_not_go_on(tmp_path):
    plan = make_plan(RECIPE, [], COEFS, 1)
    open_ablation(tmp_path / "here", plan)
    (tmp_path / "here" / "kl.coef=0").symlink_to(tmp_path)
    with pytest.raises(EvidenceError, match="is a symbolic link"):
        open_ablation(tmp_path / "here", plan)
