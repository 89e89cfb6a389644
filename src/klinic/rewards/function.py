"""A reward function with its name and weight.

A reward function is called as in TRL, by keyword: `prompts`, `completions`, `completion_ids`, and
every other column of the dataset by name, each a list with one entry per completion. It returns one
number per completion, or None to abstain.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from klinic.errors import ConfigError
from klinic.rewards.subprocess_reward import SubprocessReward

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with its name and weight."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    """Factor in the total; 0 records the values without training on them."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(
                f"the weight of reward {self.name} is {self.weight}: every total would be "
                "non-finite. Use a finite number (1 is the default)."
            )

    def close(self) -> None:
        """End the function's subprocess, if it has one; the next call starts a new one."""
        if isinstance(self.function, SubprocessReward):
            self.function.close()


def reward_name(function: RewardFunction) -> str:
    """Return the name of a reward function in metrics.

    >>> reward_name(partial(len)), reward_name(print)
    ('len', 'print')
    """
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
