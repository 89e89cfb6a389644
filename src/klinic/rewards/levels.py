"""Rewards in levels: how far a completion got, what that is worth, and why.

A binary reward is a cliff: where every completion fails, or none does, there is nothing to compare.
Levels give part of the reward for part of the answer:

    LEVELS = Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)

from the worst to the best, each a score or, with a share of the way, a range. They are monotone: a
completion that got further is never worth less, or training would teach it to stop short.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from klinic.errors import ConfigError, FunctionError

Worth = float | Sequence[float]
"""A score, or the scores at the beginning and at the end of a level."""


@dataclass(frozen=True, slots=True)
class Grade:
    """How far a completion got, and why not further."""

    level: str
    reason: str
    share: float = 0.0
    """How much of the way through its level, from 0 to 1."""


class Levels:
    """Names from the worst to the best, each with what it is worth.

    >>> Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)
    Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)
    """

    def __init__(self, **worth: Worth) -> None:
        self._ranges = {name: _range(name, given) for name, given in worth.items()}
        _check_order(list(self._ranges.items()))

    def worth(self, grade: Grade) -> float:
        """Return the score of a grade.

        >>> levels = Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)
        >>> round(levels.worth(Grade("wrong", "one of two digits is right", share=0.5)), 3)
        0.45
        """
        low, high = self._ranges[grade.level]
        return low + (high - low) * grade.share

    def changed(self, worth: Mapping[str, Worth]) -> "Levels":
        """Return the same levels with some of them worth something else.

        >>> Levels(malformed=-0.3, right=1.0).changed({"malformed": -1.0})
        Levels(malformed=-1.0, right=1.0)
        """
        unknown = [name for name in worth if name not in self._ranges]
        if unknown:
            raise ConfigError(
                f"there is no level {unknown[0]!r}. From the worst to the best there are: "
                f"{', '.join(self._ranges)}."
            )
        return Levels(**{**self._ranges, **worth})

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Levels) and list(self._ranges.items()) == list(
            other._ranges.items()
        )

    def __hash__(self) -> int:
        return hash(tuple(self._ranges.items()))

    def __repr__(self) -> str:
        parts = (
            f"{name}={low if low == high else (low, high)}"
            for name, (low, high) in self._ranges.items()
        )
        return f"Levels({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What a completion is worth, and why."""

    reward: float
    level: str
    reason: str


class Graduated:
    """A reward function made of levels and of a function that grades one completion.

    `grade` is called by keyword with the completion and the columns that it names, as in
    `grade(completion, answer)`. Use it as a decorator through `graduated`.
    """

    def __init__(self, grade: Callable[..., Grade], levels: Levels) -> None:
        self.grade = grade
        self.levels = levels
        self.__name__ = grade.__name__
        self.__module__ = grade.__module__
        self.__doc__ = grade.__doc__
        named = inspect.signature(grade).parameters
        self._columns = [name for name in named if name != "completion"]

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float]:
        """Return what each completion is worth."""
        return [explained.reward for explained in self.explain(prompts, completions, **columns)]

    def explain(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[Explained]:
        """Return what each completion is worth, its level, and why it is not a higher one."""
        known = {"prompt": prompts, **columns}
        missing = [name for name in self._columns if name not in known]
        if missing:
            raise FunctionError(
                f"the reward {self.__name__} grades by {missing[0]!r}, which is no column of the "
                f"dataset. There are: {', '.join(known)}."
            )
        rows = zip(completions, *(known[name] for name in self._columns), strict=True)
        return [
            self._explained(said, dict(zip(self._columns, row, strict=True))) for said, *row in rows
        ]

    def with_levels(self, worth: Mapping[str, Worth]) -> "Graduated":
        """Return the same reward with some levels worth something else."""
        return Graduated(self.grade, self.levels.changed(worth))

    def _explained(self, said: Any, row: Mapping[str, Any]) -> Explained:
        grade = self.grade(completion=said, **row)
        return Explained(reward=self.levels.worth(grade), level=grade.level, reason=grade.reason)


def graduated(levels: Levels) -> Callable[[Callable[..., Grade]], Graduated]:
    """Make a reward function of one that grades a completion.

    >>> @graduated(Levels(silent=-0.3, wrong=0.1, right=1.0))
    ... def polite(completion, answer):
    ...     if not completion:
    ...         return Grade("silent", "nothing was said")
    ...     return Grade("right" if completion == answer else "wrong", f"it said {completion}")
    >>> polite(prompts=["?", "?"], completions=["", "yes"], answer=["yes", "yes"])
    [-0.3, 1.0]
    >>> polite.explain(prompts=["?"], completions=["no"], answer=["yes"])
    [Explained(reward=0.1, level='wrong', reason='it said no')]
    """
    return lambda grade: Graduated(grade, levels)


def _range(name: str, given: Worth) -> tuple[float, float]:
    pair = (given, given) if isinstance(given, int | float) else tuple(given)
    if len(pair) != 2 or not all(map(math.isfinite, pair)) or pair[0] > pair[1]:
        raise ConfigError(
            f"the level {name} is {given}: it needs a score, or two that do not fall, such as "
            "0.5 or [0.1, 0.8]."
        )
    return float(pair[0]), float(pair[1])


def _check_order(ranges: Sequence[tuple[str, tuple[float, float]]]) -> None:
    for (worse, (_, high)), (better, (low, _)) in pairwise(ranges):
        if high > low:
            raise ConfigError(
                f"the level {worse} is worth up to {high}, and {better}, which is further, from "
                f"{low}: training would teach to stop short. Let scores rise with the levels."
            )
