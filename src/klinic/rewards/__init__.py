"""Reward functions: loading, calling, validation of results, aggregation.

function.py     a reward function with its name and weight
entry.py        builds a reward from a recipe entry
arguments.py    arguments of reward functions from rollouts
signature.py    selects the arguments that a function accepts
calling.py      calls functions, async ones concurrently; locates the completion that fails
returned.py     validates returned values
fault.py        the error type, with the index of the failing completion
runner.py       calls all functions on the rollouts of a step
scores.py       rewards of a step and their statistics
batch.py        adds rewards and advantages to a step record
overlong.py     soft length penalty
own_process.py  a function in a subprocess, with a time limit
process.py      the parent side of the subprocess
worker.py       the child side of the subprocess
plain.py        conversion of columns to JSON values
concurrent.py   per-completion functions: concurrency, retries, back-off
http_judge.py   a judge behind a URL
levels.py       graduated rewards
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
    # lazy: the subprocess worker imports this package, and restarts often
    if name in HOMES:
        return getattr(import_module(f"klinic.rewards.{HOMES[name]}"), name)
    raise AttributeError(f"module 'klinic.rewards' has no attribute {name!r}")
