"""The nearest key to a name that is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.recipe.aliases import ALIASES
from klinic.recipe.keys import (
    edit_distance,
    optional_sections,
    recipe_fields,
    recipe_sections,
    suggest_names,
)


def test_sections_and_which_of_them_mean_off_when_absent():
    assert list(recipe_sections()) == [
        "model",
        "data",
        "eval",
        "retention",
        "kl",
        "reference",
        "teacher",
        "sampling",
        "sampler",
        "cluster",
        "loop",
        "learner",
        "recovery",
        "warm_start",
        "output",
    ]
    off = {"eval", "retention", "kl", "teacher", "cluster", "recovery", "warm_start"}
    assert optional_sections() == off


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learner.learnin_rate", "learner.learning_rate"),
        ("lerner", "learner"),
        ("lerner.loss", "learner.loss"),
        ("learner.max_steps", "loop.max_steps"),
        ("kl.beta", "beta"),
        ("num_generation", "num_generations"),
        ("eval_every", "loop.eval_every"),
        ("sampling.tempratur", "sampling.temperature"),
        ("kl.estimater", "kl.estimator"),
    ],
)
def test_a_slip_is_understood(name, meant):
    assert suggest_names(name, ALIASES)[0] == meant


def test_equally_near_names_are_all_offered():
    assert suggest_names("sampling.top_x", {}) == ["sampling.top_p", "sampling.top_k"]


@pytest.mark.parametrize("name", ["", "5", "zebra", "x" * 10_000, "kl.zebra", "."])
def test_a_name_that_is_like_none_has_no_nearest(name):
    assert suggest_names(name, ALIASES) == []


@given(st.sampled_from(list(recipe_fields())), st.data())
def test_a_dropped_letter_is_always_understood(key, data):
    section, dot, leaf = key.rpartition(".")
    at = data.draw(st.integers(0, len(leaf) - 1))
    name = section + dot + leaf[:at] + leaf[at + 1 :]
    if name not in recipe_fields() and len(leaf) > 3:
        assert key in suggest_names(name, {})


words = st.text("abc", max_size=6)


@given(words, words)
def test_edits_are_a_distance(one, other):
    assert edit_distance(one, other) == edit_distance(other, one)
    assert (edit_distance(one, other) == 0) == (one == other)
    assert abs(len(one) - len(other)) <= edit_distance(one, other) <= max(len(one), len(other))


@given(words, words)
def test_swapping_neighbours_is_one_edit(one, other):
    swapped = one + "yx" + other
    assert edit_distance(one + "xy" + other, swapped) == 1
