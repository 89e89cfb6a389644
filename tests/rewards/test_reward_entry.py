"""From an entry of a recipe to a reward."""

import pytest
from pydantic import ValidationError

from klinic.errors import ConfigError, FunctionError
from klinic.recipe import from_keywords
from klinic.recipe.rewards import RewardEntry
from klinic.rewards.entry import build_reward
from klinic.rewards.runner import score
from klinic.rewards.subprocess_reward import SubprocessReward
from klinic.tasks.arithmetic.task import TASK
from rewards.rollouts import rollout

named = TASK.rewards.__getitem__
"""The rewards of a task."""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lengths.py"
    path.write_text("def length(completions):\n    return [len(text) for text in completions]\n")
    return path


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_a_function_is_found_here_or_in_a_process_of_its_own(file, timeout):
    entry = RewardEntry(function=f"{file}:length", weight=0.5, timeout=timeout)
    reward = build_reward(entry, named)
    assert (reward.name, reward.weight) == ("length", 0.5)
    assert isinstance(reward.function, SubprocessReward) == (timeout is not None)
    assert score([rollout("ab")], [reward]).total.tolist() == [1.0]
    reward.close()


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_a_reward_of_the_task_is_found_by_its_name(timeout):
    reward = build_reward(RewardEntry(function="binary", timeout=timeout), named)
    assert reward.name == "binary"
    assert score([rollout("2", answer="2")], [reward]).total.tolist() == [1.0]
    reward.close()


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_a_function_that_is_not_there_is_said_before_the_run(file, timeout):
    with pytest.raises(FunctionError, match="has no function 'width'"):
        build_reward(RewardEntry(function=f"{file}:width", timeout=timeout), named)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"function": "a:b", "concurrency": 4}, "concurrency is 4, but a:b is not a URL"),
        ({"function": "binary", "retries": 0}, "retries is 0, but binary is not a URL"),
        ({"function": "a:b", "timeout": 0.0}, "time limit in seconds. Use more than 0"),
        ({"function": "ftp://host/score"}, "is not the URL of a judge. Use http://"),
        ({"function": "http:///score"}, "is not the URL of a judge"),
        ({"function": "http://host:99999/score"}, "is not a URL: Port out of range"),
        ({"function": "http://me:secret@host/"}, "the URL of host holds a password"),
        ({"function": "http://host/", "concurrency": 0}, "Use 1 or more"),
    ],
)
def test_what_cannot_work_is_refused(keys, told):
    with pytest.raises(ValidationError, match=told):
        RewardEntry(**keys)


def test_a_recipe_says_which_entry_it_is():
    rewards = ["a:b", {"function": "a:c", "retries": 5}]
    with pytest.raises(
        ConfigError, match=r"rewards\[1\] is .*: retries is 5, but a:c is not a URL"
    ):
        from_keywords(model="tiny", data={"path": "rows.jsonl"}, rewards=rewards)


def test_a_resolved_recipe_loads_again(tmp_path):
    from klinic.recipe import dump_recipe, load_recipe

    rewards = ["a:b", {"function": "a:c", "timeout": 5}, {"function": "http://h/s", "retries": 5}]
    recipe = from_keywords(model="tiny", data={"path": "rows.jsonl"}, rewards=rewards).recipe
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.yaml").recipe == recipe
