"""The `rewards` list: what a completion is worth."""

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from klinic.recipe.section import CountOrZero, Section, Text, within

LONGEST_WAIT = 86_400  # seconds; a step that waits for a day has stopped
MOST_AT_ONCE = 1_000  # open connections; more than a process usually may have

Seconds = Annotated[float, within("it is a time limit in seconds", above=0, high=LONGEST_WAIT)]
AtOnce = Annotated[int, within("it is a number of open requests", low=1, high=MOST_AT_ONCE)]


def _pair_from_list(value: object) -> object:
    """Return a list as a tuple: pydantic below 2.12 refuses one in a union of a strict section."""
    return tuple(value) if isinstance(value, list) else value


Score = Annotated[float | tuple[float, float], BeforeValidator(_pair_from_list)]


class RewardEntry(Section):
    """One reward function and its share of the sum; text alone is a function of weight 1."""

    function: Text
    """A reward of the task (`binary`), `module:function`, `file.py:function`, or a judge's URL."""
    weight: float = 1.0
    """What the reward is multiplied by before rewards are added."""
    timeout: Seconds | None = None
    """Seconds for a call, in a process of its own; null is no limit, and 30 for a URL."""
    concurrency: AtOnce = 8
    """Completions that a judge behind a URL has at a time."""
    retries: CountOrZero = 2
    """How often a judge behind a URL is asked again about a completion."""

    levels: Mapping[str, Score] | None = None
    """What levels of a graduated reward are worth (`{malformed: -0.5}`); null is its own scores."""

    @property
    def is_url(self) -> bool:
        """Whether this is a judge behind HTTP and not a function."""
        return "://" in self.function

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_function(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _only_a_judge_is_asked_again(self) -> "RewardEntry":
        if self.is_url:
            _check_url(self.function)
            self._refuse_levels(f"{self.function} is a URL, and a judge there has no levels")
            return self
        if self.timeout is not None:
            self._refuse_levels(
                "with a timeout the reward runs in a process of its own, which knows its own "
                "levels alone"
            )
        for name in ("concurrency", "retries"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {value}, but {self.function} is no URL: a function is called once "
                    "for all completions. Leave it out, or use klinic.rewards.per_completion in "
                    "the function"
                )
        return self

    def _refuse_levels(self, why: str) -> None:
        if self.levels is not None:
            raise ValueError(f"levels are given, but {why}. Leave one of the two out")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ValueError(f"{url} is no judge's URL. Use http://HOST:PORT/PATH, or https")


# a YAML list becomes a tuple, so that a recipe is frozen all the way down
Rewards = Annotated[tuple[RewardEntry, ...], Field(strict=False)]
