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

    def is_correct(self, row: Mapping[str, str], completion: str) -> bool:
        """Return whether the answer in a completion equals that of its row."""
        answer = self.parse(row, completion)
        return answer is not None and answer == self.parse(row, row["answer"])


def look_up(kind: str, name: str, options: Mapping[str, Named]) -> Named:
    """Look up a name; raise ConfigError with the available names if it is unknown.

    >>> look_up("skill", "adition", {"addition": 1, "copying": 2})
    Traceback (most recent call last):
    klinic.errors.ConfigError: there is no skill 'adition'. Did you mean addition? There are: \
addition, copying.
    """
    if name in options:
        return options[name]
    close = get_close_matches(name, options, n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    raise ConfigError(f"there is no {kind} {name!r}. {guess}There are: {', '.join(options)}.")


Completion = str | Sequence[Mapping[str, str]]


def completion_text(completion: Completion) -> str:
    """Return the text of a completion: the string, or the content of the last message.

    >>> completion_text([{"role": "assistant", "content": "42"}])
    '42'
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]
