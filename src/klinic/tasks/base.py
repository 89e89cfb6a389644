"""What a task is: rows to train on, rows held out, rewards, and what counts as right."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from klinic.errors import ConfigError
from klinic.rewards.function import RewardFunction

Named = TypeVar("Named")

Row = dict[str, str]
"""`prompt`, `answer` and `skill`; in a warm start `prompt` and `completion`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to learn whose answers a program can judge."""

    name: str
    skills: tuple[str, ...]
    """Parts of the task which are trained and measured on their own."""
    default_skill: str
    train_rows: Callable[[str], Sequence[Row]]
    """All rows of a skill that may be trained on."""
    eval_rows: Callable[[str, int], list[Row]]
    """The first rows of a skill that are held out; asking for fewer gives a part of the same."""
    warm_start_rows: Callable[[int], Iterator[Row]]
    """An endless mix of all skills for supervised training, from the rows of training alone."""
    rewards: Mapping[str, RewardFunction]
    default_reward: str
    parse: Callable[[Mapping[str, str], str], str | None]
    """The answer that a completion gives, or None where it gives none."""
    measures: tuple[str, ...] = ()
    """Rewards whose means over held-out rows are told beside accuracy."""

    def correct(self, row: Mapping[str, str], completion: str) -> bool:
        """Whether a completion gives the answer of its row."""
        given = self.parse(row, completion)
        return given is not None and given == self.parse(row, row["answer"])


def choose(kind: str, name: str, known: Mapping[str, Named]) -> Named:
    """Return what goes by this name, or say which names there are.

    >>> choose("skill", "adition", {"addition": 1, "copying": 2})
    Traceback (most recent call last):
    klinic.errors.ConfigError: there is no skill 'adition'. Did you mean addition? There are: \
addition, copying.
    """
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    raise ConfigError(f"there is no {kind} {name!r}. {guess}There are: {', '.join(known)}.")
