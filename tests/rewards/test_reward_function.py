"""A reward has a name, a function and a weight that is a number."""

import math

import pytest

from klinic.errors import ConfigError
from klinic.rewards.function import Reward


def test_the_weight_is_one_unless_given():
    assert Reward(name="length", function=len).weight == 1.0


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(weight):
    with pytest.raises(ConfigError, match="weight of reward length is"):
        Reward(name="length", function=len, weight=weight)


def test_closing_a_function_of_this_process_does_nothing():
    class Judge:
        def close(self):
            raise AssertionError("it is the user's")

        def __call__(self, completions):
            return []

    Reward(name="judge", function=Judge()).close()
