"""Every recipe that comes with klinic can be read, and says what it is for."""

from pathlib import Path

import pytest

from klinic.recipe.loading import load_recipe
from klinic.recipe.recipe import check_complete

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_without_a_word_and_begins_with_its_purpose(path):
    loaded = load_recipe(path)
    assert loaded.notes == []  # recipes use the names that klinic uses
    check_complete(loaded.recipe)
    text = path.read_text()
    assert text.startswith("# ")
    assert f"klinic train recipes/{path.name}" in text


def test_the_names_people_ask_for_are_there():
    assert {path.stem for path in RECIPES} >= {
        "arithmetic",
        "smollm2-lora",
        "gsm8k",
        "musique",
        "conservative",
        "qwen2.5-3b-lora-24gb",
        "qwen2.5-7b-lora",
        "qwen2.5-7b-lora-8gpu",
    }


def test_the_conservative_recipe_is_conservative():
    recipe = load_recipe(next(path for path in RECIPES if path.stem == "conservative")).recipe
    assert recipe.learner.learning_rate == 1e-6
    assert recipe.kl.coef == 0.001
    assert (recipe.learner.clip_low, recipe.learner.clip_high) == (0.1, 0.1)
