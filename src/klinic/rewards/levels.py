"""Graduated rewards: levels with scores, partial credit for partial answers.

A binary reward gives no signal where every completion of a group fails or every one succeeds.
Levels give partial credit:

    LEVELS = Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)

from the worst to the best, each a score, or a range that `Grade.share` interpolates. Scores must
not decrease from level to level, or training would reward stopping early.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from klinic.errors import ConfigError, FunctionError

LevelScore = float | Sequence[float]
"""A score, or the scores at the start and end of a level."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The level a completion reached, and the reason."""

    level: str
    reason: str
    share: float = 0.0
    """Position within the level's range, from 0 to 1."""


class Levels:
    """Level names from the worst to the best, with their scores.

    >>> Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)
    Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)
    """

    def __init__(self, **worth: LevelScore) -> None:
        self._ranges = {name: _score_range(name, score) for name, score in worth.items()}
        _check_order(list(self._ranges.items()))

    def score(self, grade: Grade) -> float:
        """Return the score of a grade.

        >>> levels = Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)
        >>> round(levels.score(Grade("wrong", "one of two digits is right", share=0.5)), 3)
        0.45
        """
        low, high = self._ranges[grade.level]
        return low + (high - low) * grade.share

    def replace_scores(self, worth: Mapping[str, LevelScore]) -> "Levels":
        """Return the levels with some scores replaced.

        >>> Levels(malformed=-0.3, right=1.0).replace_scores({"malformed": -1.0})
        Levels(malformed=-1.0, right=1.0)
        """
        unknown = [name for name in worth if name not in self._ranges]
        if unknown:
            raise ConfigError(
                f"there is no level {unknown[0]!r}. Levels from worst to best: "
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
class GradedReward:
    """The reward of a completion, its level and the reason."""

    reward: float
    level: str
    reason: str


class GraduatedReward:
    """A reward function built from levels and a function that grades one completion.

    `grade` is called by keyword with the completion and the columns in its signature, as in
    `grade(completion, answer)`. The decorator `graduated` builds one.
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
        """Return the reward of each completion."""
        return [explained.reward for explained in self.explain(prompts, completions, **columns)]

    def explain(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[GradedReward]:
        """Return the reward, level and reason of each completion."""
        all_columns = {"prompt": prompts, **columns}
        missing = [name for name in self._columns if name not in all_columns]
        if missing:
            raise FunctionError(
                f"the reward {self.__name__} needs {missing[0]!r}, which is not a column of the "
                f"dataset. Columns: {', '.join(all_columns)}."
            )
        rows = zip(completions, *(all_columns[name] for name in self._columns), strict=True)
        return [
            self._explain_one(completion, dict(zip(self._columns, row, strict=True)))
            for completion, *row in rows
        ]

    def with_levels(self, worth: Mapping[str, LevelScore]) -> "GraduatedReward":
        """Return the same reward with the scores of some levels replaced."""
        return GraduatedReward(self.grade, self.levels.replace_scores(worth))

    def _explain_one(self, completion: Any, row: Mapping[str, Any]) -> GradedReward:
        grade = self.grade(completion=completion, **row)
        return GradedReward(reward=self.levels.score(grade), level=grade.level, reason=grade.reason)


def graduated(levels: Levels) -> Callable[[Callable[..., Grade]], GraduatedReward]:
    """Decorator: build a reward function from one that grades a completion.

    >>> @graduated(Levels(silent=-0.3, wrong=0.1, right=1.0))
    ... def polite(completion, answer):
    ...     if not completion:
    ...         return Grade("silent", "it is empty")
    ...     level = "right" if completion == answer else "wrong"
    ...     return Grade(level, f"the answer is {completion}")
    >>> polite(prompts=["?", "?"], completions=["", "yes"], answer=["yes", "yes"])
    [-0.3, 1.0]
    >>> polite.explain(prompts=["?"], completions=["no"], answer=["yes"])
    [GradedReward(reward=0.1, level='wrong', reason='the answer is no')]
    """
    return lambda grade: GraduatedReward(grade, levels)


def _score_range(name: str, score: LevelScore) -> tuple[float, float]:
    pair = (score, score) if isinstance(score, int | float) else tuple(score)
    if len(pair) != 2 or not all(map(math.isfinite, pair)) or pair[0] > pair[1]:
        raise ConfigError(
            f"the level {name} is {score}: use a score, or two that do not decrease, such as "
            "0.5 or [0.1, 0.8]."
        )
    return float(pair[0]), float(pair[1])


def _check_order(ranges: Sequence[tuple[str, tuple[float, float]]]) -> None:
    for (worse, (_, high)), (better, (low, _)) in pairwise(ranges):
        if high > low:
            raise ConfigError(
                f"the level {worse} scores up to {high}, and the better level {better} from {low}: "
                "training would reward the worse one. Make scores increase with the levels."
            )
