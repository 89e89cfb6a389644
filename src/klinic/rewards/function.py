"""A reward function with its name and weight.

A reward function is called as TRL calls it, by keyword: `prompts`, `completions` and
`completion_ids`, and every other column of the dataset under its own name, each a list with one
entry a completion. It returns one number a completion, or None where it has no opinion.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from klinic.errors import ConfigError
from klinic.rewards.own_process import Killable

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A function that judges completions, and how much its word counts."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    """What its numbers are multiplied by; 0 records them without training on them."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(
                f"the weight of reward {self.name} is {self.weight}: every reward would be as "
                "well. Use a finite number (1 is the default)."
            )

    def close(self) -> None:
        """End the function's own process, if it has one; another call starts another."""
        if isinstance(self.function, Killable):
            self.function.close()
