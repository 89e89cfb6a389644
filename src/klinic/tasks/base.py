"""The `Task` type: training rows, held-out rows, rewards, and the answer parser."""

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
    """A task with verifiable answers."""

    name: str
    skills: tuple[str, ...]
    """Parts of the task that are trained and evaluated separately."""
    default_skill: str
    train_rows: Callable[[str], Sequence[Row]]
    """All rows of a skill that may be trained on."""
    eval_rows: Callable[[str, int], list[Row]]
    """The first held-out rows of a skill; a smaller number returns a prefix."""
    warm_start_rows: Callable[[int], Iterator[Row]]
    """An endless mix of all skills for supervised training, from training rows only."""
    rewards: Mapping[str, RewardFunction]
    default_reward: str
    parse: Callable[[Mapping[str, str], str], str | None]
    """The answer in a completion, or None if there is none."""
    measures: tuple[str, ...] = ()
    """Rewards reported in evaluations in addition to accuracy."""

    def correct(self, row: Mapping[str, str], completion: str) -> bool:
        """Return whether the answer in a completion equals that of its row."""
        given = self.parse(row, completion)
        return given is not None and given == self.parse(row, row["answer"])


def choose(kind: str, name: str, known: Mapping[str, Named]) -> Named:
    """Look up a name; raise ConfigError with the available names if it is unknown.

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
