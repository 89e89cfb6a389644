"""Options by the names that other trainers use: `--config FILE` and `--checkpoint PATH`."""

from pathlib import Path

import pytest

from klinic.cli.eval import choose_checkpoint
from klinic.cli.train import choose_recipe
from klinic.errors import ConfigError

A, B = Path("a.yaml"), Path("b.yaml")


@pytest.mark.parametrize(
    ("recipe", "overrides", "config", "chosen"),
    [
        (A, ["seed=1"], None, (A, ["seed=1"])),
        (None, [], B, (B, [])),
        (Path("kl.coef=0.1"), ["seed=1"], B, (B, ["kl.coef=0.1", "seed=1"])),
    ],
)
def test_a_recipe_is_an_argument_or_a_config(recipe, overrides, config, chosen):
    assert choose_recipe(recipe, overrides, config) == chosen


def test_a_recipe_is_needed():
    with pytest.raises(ConfigError, match="train needs a recipe: klinic train recipes/arith"):
        choose_recipe(None, [], None)


@pytest.mark.parametrize(("argument", "option"), [("runs/a", None), (None, "runs/a")])
def test_a_checkpoint_is_an_argument_or_an_option(argument, option):
    assert choose_checkpoint(argument, option) == "runs/a"


@pytest.mark.parametrize(("argument", "option"), [(None, None), ("a", "b")])
def test_one_checkpoint_is_needed(argument, option):
    with pytest.raises(ConfigError, match="give one checkpoint"):
        choose_checkpoint(argument, option)
