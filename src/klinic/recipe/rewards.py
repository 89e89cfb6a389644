"""The `rewards` list: reward functions with their weights."""

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from klinic.recipe.section import CountOrZero, Section, Text, within

MAX_TIMEOUT = 86_400  # seconds; a step that waits for a day is stuck
MAX_CONCURRENCY = 1_000  # open connections; near the usual file limit of a process

Seconds = Annotated[float, within("it is a time limit in seconds", above=0, high=MAX_TIMEOUT)]
Concurrency = Annotated[int, within("it is a number of open requests", low=1, high=MAX_CONCURRENCY)]


def _pair_from_list(value: object) -> object:
    """Convert a list to a tuple: pydantic below 2.12 refuses lists in unions of strict models."""
    return tuple(value) if isinstance(value, list) else value


Score = Annotated[float | tuple[float, float], BeforeValidator(_pair_from_list)]


class RewardEntry(Section):
    """One reward function and its weight; a plain string is a function of weight 1."""

    function: Text
    """A reward of the task (`binary`), `module:function`, `file.py:function`, or a judge's URL."""
    weight: float = 1.0
    """Factor of this reward in the total."""
    timeout: Seconds | None = None
    """Time limit of a call in seconds, enforced in a subprocess; null: none, and 30 for a URL."""
    concurrency: Concurrency = 8
    """Concurrent requests to an HTTP judge."""
    retries: CountOrZero = 2
    """Retries of a failed request to an HTTP judge."""

    levels: Mapping[str, Score] | None = None
    """Scores of levels of a graduated reward (`{malformed: -0.5}`); null: its own scores."""

    @property
    def is_url(self) -> bool:
        """Whether this is an HTTP judge and not a function."""
        return "://" in self.function

    @model_validator(mode="before")
    @classmethod
    def _parse_shorthand(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_combination(self) -> "RewardEntry":
        if self.is_url:
            _check_url(self.function)
            self._refuse_levels(f"{self.function} is a URL, and an HTTP judge has no levels")
            return self
        if self.timeout is not None:
            self._refuse_levels(
                "with a timeout the reward runs in a subprocess, where its levels cannot be changed"
            )
        for name in ("concurrency", "retries"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {value}, but {self.function} is not a URL: a function is called "
                    "once for all completions. Remove the key, or use "
                    "klinic.rewards.per_completion in the function"
                )
        return self

    def _refuse_levels(self, why: str) -> None:
        if self.levels is not None:
            raise ValueError(f"levels is set, but {why}. Remove one of the two")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ValueError(f"{url} is not the URL of a judge. Use http://HOST:PORT/PATH, or https")


# not strict: a YAML list becomes a tuple, so that recipes are immutable
Rewards = Annotated[tuple[RewardEntry, ...], Field(strict=False)]
