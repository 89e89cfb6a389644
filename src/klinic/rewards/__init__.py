"""Reward functions: loading, calling, validation of results, aggregation.

function.py           a reward function with its name and weight
entry.py              builds a reward from a recipe entry
arguments.py          arguments of reward functions from rollouts
signature.py          selects the arguments that a function accepts
invoke.py             calls functions, async ones concurrently; locates the failing completion
parse_result.py       validates returned values; the error with the failing completion's index
runner.py             calls all functions on the rollouts of a step
scores.py             rewards of a step, their statistics, the soft length penalty
subprocess_reward.py  a function in a subprocess, with a time limit: parent side
subprocess_worker.py  child side
json_values.py        conversion of columns to JSON values
concurrency.py        per-completion functions: concurrency, retries, back-off
http_judge.py         a judge behind a URL
levels.py             graduated rewards
answer_pay.py         pay of completions that state the dataset's answer
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from klinic.rewards.concurrency import per_completion
    from klinic.rewards.levels import Grade, Levels, graduated
    from klinic.rewards.subprocess_reward import killable

__all__ = ["Grade", "Levels", "graduated", "killable", "per_completion"]

HOMES = {
    "Grade": "levels",
    "Levels": "levels",
    "graduated": "levels",
    "killable": "subprocess_reward",
    "per_completion": "concurrency",
}


def __getattr__(name: str) -> Any:
    # lazy: the subprocess worker imports this package, and restarts often
    if name in HOMES:
        return getattr(import_module(f"klinic.rewards.{HOMES[name]}"), name)
    raise AttributeError(f"module 'klinic.rewards' has no attribute {name!r}")
