"""Levels rise with what they are worth, every grade has a reason, and a recipe may set scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError, FunctionError
from klinic.recipe.rewards import RewardEntry
from klinic.rewards import Grade, Levels, graduated
from klinic.rewards.entry import build_reward

LEVELS = Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)


@graduated(LEVELS)
def number(completion, answer):
    """Grade a number."""
    if not completion.isdigit():
        return Grade("malformed", f"{completion!r} is no number")
    if completion == answer:
        return Grade("right", "it is the answer")
    return Grade("wrong", "it is another number", share=0.5)


def test_each_level_has_its_score_and_each_completion_its_reason():
    given_ = {"prompts": ["?"] * 3, "completions": ["x", "7", "8"], "answer": ["8"] * 3}
    assert number(**given_) == pytest.approx([-0.3, 0.45, 1.0])
    explained = number.explain(**given_)
    assert [e.level for e in explained] == ["malformed", "wrong", "right"]
    assert explained[0].reason == "'x' is no number"


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_who_got_further_is_never_worth_less(scores, share, further):
    levels = Levels(**{f"level{i}": score for i, score in enumerate(sorted(scores))})
    worth = [levels.score(Grade(name, "", share)) for name in levels]
    assert worth == sorted(worth)
    low, high = sorted((share, further))
    wide = Levels(only=(min(scores), max(scores)))
    assert wide.score(Grade("only", "", low)) <= wide.score(Grade("only", "", high))


@pytest.mark.parametrize(
    ("worth", "said"),
    [
        ({"bad": 0.5, "good": 0.4}, "bad scores up to 0.5, and the better level good"),
        ({"bad": (0.0, 0.5), "good": 0.4}, "training would reward the worse one"),
        ({"bad": (0.5, 0.0)}, "two that do not decrease"),
        ({"bad": (0.1, 0.2, 0.3)}, "use a score, or two"),
        ({"bad": float("nan")}, "use a score"),
        ({"bad": float("inf")}, "use a score"),
    ],
)
def test_levels_that_fall_or_are_no_numbers_are_refused(worth, said):
    with pytest.raises(ConfigError, match=said):
        Levels(**worth)


def test_a_recipe_sets_what_a_level_is_worth():
    entry = RewardEntry.model_validate(
        {"function": "number", "levels": {"malformed": -1, "wrong": [0.0, 0.5]}}
    )
    reward = build_reward(entry, {"number": number}.__getitem__)
    found = reward.function(prompts=["?"] * 3, completions=["x", "7", "8"], answer=["8"] * 3)
    assert found == [-1.0, 0.25, 1.0]
    assert number.levels == LEVELS  # the task's own reward is as it was


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ({"malfromed": -1.0}, "no level 'malfromed'. Levels from worst to best: malf"),
        ({"malformed": 2.0}, "rewards: number: the level malformed scores up to 2.0"),
    ],
)
def test_levels_of_a_recipe_that_cannot_be_are_refused(levels, said):
    entry = RewardEntry(function="number", levels=levels)
    with pytest.raises(ConfigError, match=said):
        build_reward(entry, {"number": number}.__getitem__)


def test_a_reward_without_levels_has_none_to_set():
    entry = RewardEntry(function="plain", levels={"malformed": -1.0})
    with pytest.raises(ConfigError, match="levels is set for plain, which has none"):
        build_reward(entry, {"plain": lambda completions: [0.0]}.__getitem__)


@pytest.mark.parametrize(
    "entry",
    [
        {"function": "number", "timeout": 1.0, "levels": {"malformed": -1.0}},
        {"function": "http://127.0.0.1:1/score", "levels": {"malformed": -1.0}},
    ],
)
def test_levels_do_not_reach_another_process(entry):
    with pytest.raises(ValueError, match="levels is set, but"):
        RewardEntry.model_validate(entry)


def test_a_column_that_is_missing_is_named():
    with pytest.raises(FunctionError, match="needs 'answer', which is not a column"):
        number(prompts=["?"], completions=["7"])
