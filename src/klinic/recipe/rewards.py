"""The `rewards` list: what a completion is worth."""

from typing import Any

from pydantic import model_validator

from klinic.recipe.section import Section, Text


class RewardEntry(Section):
    """One reward function and its share of the sum; text alone is a function of weight 1."""

    function: Text
    """A reward of the task (`binary`), or `module:function`, or `file.py:function`."""
    weight: float = 1.0
    """What the reward is multiplied by before rewards are added."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_function(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value
