"""Reward functions: what they are, and how they are called.

function.py     a reward function with its name and weight
entry.py        from an entry of a recipe to the function
arguments.py    what such a function can be given
signature.py    what it takes of that
calling.py      a call, several calls at once, and which completion broke one
returned.py     numbers out of whatever it returned
fault.py        what is wrong with it, and at which completion
runner.py       the completions of a step through all functions
scores.py       what came out, and its statistics
batch.py        rewards and advantages put to the rows of a step
own_process.py  a function in a process of its own, with a time limit
process.py      that process, seen from here
worker.py       that process, from inside
plain.py        what goes there: values as JSON holds them
concurrent.py   a function of one completion, many at once, each tried again
http_judge.py   a judge behind a URL
levels.py       levels with scores: part of the reward for part of the answer
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from klinic.rewards.concurrent import per_completion
    from klinic.rewards.levels import Grade, Levels, graduated
    from klinic.rewards.own_process import killable

__all__ = ["Grade", "Levels", "graduated", "killable", "per_completion"]

HOMES = {
    "Grade": "levels",
    "Levels": "levels",
    "graduated": "levels",
    "killable": "own_process",
    "per_completion": "concurrent",
}


def __getattr__(name: str) -> Any:
    # on demand: worker.py is in this package too, and starts often
    if name in HOMES:
        return getattr(import_module(f"klinic.rewards.{HOMES[name]}"), name)
    raise AttributeError(f"module 'klinic.rewards' has no attribute {name!r}")
