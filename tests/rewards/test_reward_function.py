"""A reward is found by name, and its weight is a number."""

import math

import pytest

from klinic.errors import ConfigError, FunctionError
from klinic.rewards.function import Reward, load_reward


def test_a_reward_is_loaded_from_a_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def length(completions, **kwargs):\n    return [len(c) for c in completions]\n"
    )
    reward = load_reward(f"{path}:length", weight=0.5)
    assert (reward.name, reward.weight) == ("length", 0.5)
    assert reward.function(completions=["abc"]) == [3]


def test_the_weight_is_one_unless_given():
    assert load_reward("operator:neg").weight == 1.0


def test_a_name_without_a_function_is_refused():
    with pytest.raises(FunctionError, match=r"my_rewards\.py:correct"):
        load_reward("length")


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(weight):
    with pytest.raises(ConfigError, match="weight of reward length is"):
        Reward(name="length", function=len, weight=weight)
