"""Call a user's reward functions, and let nothing they do pass for a reward.

What they print goes to standard error: standard output belongs to the command that runs them.
"""

import asyncio
import inspect
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import count
from typing import Any

import numpy as np
from jaxtyping import Float64

from klinic.errors import ConfigError, RewardError
from klinic.evidence.rollout import Rollout
from klinic.rewards.arguments import arguments
from klinic.rewards.function import Reward
from klinic.rewards.returned import Returned, as_list, as_numbers
from klinic.rewards.scores import Scores


def score(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> Scores:
    """Return what all functions say of the rollouts, in the order of the rollouts."""
    if not rewards:
        raise ConfigError("there is no reward function, so nothing can be learnt. Name one.")
    returned = [_run(reward, rollouts) for reward in rewards]
    total = _total(rewards, returned, len(rollouts))
    return Scores(
        total=total,
        parts=dict(zip(_distinct_names(rewards), (r.values for r in returned), strict=True)),
        num_missing=int(np.isnan(total).sum()),
        num_nonfinite=sum(r.num_nonfinite for r in returned),
    )


def _run(reward: Reward, rollouts: Sequence[Rollout]) -> Returned:
    given = arguments(reward, rollouts)
    try:
        with redirect_stdout(sys.stderr):
            values = as_list(reward.name, _call(reward, given), len(rollouts))
            return as_numbers(reward.name, values)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise RewardError(
            f"the reward {reward.name} failed on {len(rollouts)} completions, given "
            f"{', '.join(given)}: {type(error).__name__}: {error}. It must return one number a "
            "completion; return None for one that it cannot judge."
        ) from error


def _call(reward: Reward, given: dict[str, list[Any]]) -> Any:
    result = reward.function(**given)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _total(
    rewards: Sequence[Reward], returned: Sequence[Returned], num: int
) -> Float64[np.ndarray, "B"]:
    """Return the weighted sums; a function of weight 0 only watches, and makes no total of 0."""
    total, given = np.zeros(num), np.zeros(num, np.bool_)
    for reward, numbers in zip(rewards, returned, strict=True):
        if reward.weight != 0:
            is_number = ~np.isnan(numbers.values)
            with np.errstate(over="ignore"):  # what overflows is found below
                total[is_number] += reward.weight * numbers.values[is_number]
            given |= is_number
    total[~given | ~np.isfinite(total)] = np.nan  # finite parts can add up to infinity
    return total


def _distinct_names(rewards: Sequence[Reward]) -> list[str]:
    """Return the names, the second `length` as `length_2`.

    >>> _distinct_names([Reward(name=name, function=len) for name in ("a", "a", "a_2", "a")])
    ['a', 'a_2', 'a_2_2', 'a_3']
    """
    names: list[str] = []
    for reward in rewards:
        numbered = (f"{reward.name}_{number}" for number in count(2))
        name = reward.name
        while name in names:
            name = next(numbered)
        names.append(name)
    return names
