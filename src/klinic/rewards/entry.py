"""Builds a reward from an entry of the `rewards` list."""

from collections.abc import Callable, Mapping

from klinic.errors import ConfigError
from klinic.recipe.function import find_function
from klinic.recipe.rewards import RewardEntry
from klinic.rewards.concurrent import Patience
from klinic.rewards.function import Reward, RewardFunction
from klinic.rewards.http_judge import http_judge, name_of_url
from klinic.rewards.levels import Graduated, Worth
from klinic.rewards.own_process import Killable, name_of

FOR_A_URL = 30.0  # seconds, the default


def reward_of(entry: RewardEntry, named: Callable[[str], RewardFunction]) -> Reward:
    """Build the reward of an entry; `task_reward` looks up the task's own rewards by name.

    A reward with a timeout starts its subprocess here; `Reward.close` ends it, and so does any exit
    of this process.
    """
    name, function = _function(entry, named)
    if entry.levels is not None:
        function = _with_levels(name, function, entry.levels)
    return Reward(name=name, function=function, weight=entry.weight)


def _function(
    entry: RewardEntry, named: Callable[[str], RewardFunction]
) -> tuple[str, RewardFunction]:
    target = entry.function
    if entry.is_url:
        patience = Patience(
            concurrency=entry.concurrency,
            retries=entry.retries,
            timeout=entry.timeout or FOR_A_URL,
        )
        return name_of_url(target), http_judge(target, patience)
    if ":" not in target:
        function = named(target)
        return target, function if entry.timeout is None else Killable(
            name_of(function), timeout=entry.timeout
        )
    name = target.rpartition(":")[2]
    if entry.timeout is not None:
        return name, Killable(target, timeout=entry.timeout)
    return name, find_function(target, example="my_rewards.py:correct")


def _with_levels(name: str, function: RewardFunction, worth: Mapping[str, Worth]) -> RewardFunction:
    if not isinstance(function, Graduated):
        raise ConfigError(
            f"rewards: levels is set for {name}, which has none. Make it with "
            "klinic.rewards.graduated, or remove levels."
        )
    try:
        return function.with_levels(worth)
    except ConfigError as error:
        raise ConfigError(f"rewards: {name}: {error}") from None
