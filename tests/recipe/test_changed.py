"""The settings of a recipe that differ from their defaults."""

from pathlib import Path

import pytest

from klinic.recipe.changed import changed_settings
from klinic.recipe.loading import from_keywords, load_recipe

RECIPES = sorted(Path("recipes").glob("*.yaml"))


def test_a_minimal_recipe_has_its_two_lines():
    recipe = from_keywords(model="tiny", task="arithmetic").recipe
    assert changed_settings(recipe) == {"model": {"name": "tiny"}, "data": {"task": "arithmetic"}}


def test_a_section_that_is_switched_on_or_off_is_a_change():
    recipe = from_keywords(model="tiny", task="arithmetic", kl={}, recovery=None).recipe
    changed = changed_settings(recipe)
    assert changed["kl"] == {}
    assert changed["recovery"] is None


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_changed_settings_alone_make_the_same_recipe(path):
    recipe = load_recipe(path).recipe
    assert from_keywords(**changed_settings(recipe)).recipe == recipe
