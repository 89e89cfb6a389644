"""Builds a reward from an entry of the `rewards` list."""

from collections.abc import Callable, Mapping

from klinic.errors import ConfigError
from klinic.recipe.function import find_function
from klinic.recipe.rewards import RewardEntry
from klinic.rewards.concurrency import CallLimits
from klinic.rewards.function import Reward, RewardFunction
from klinic.rewards.http_judge import http_judge, judge_name
from klinic.rewards.levels import GraduatedReward, LevelScore
from klinic.rewards.subprocess_reward import SubprocessReward, import_name

DEFAULT_JUDGE_TIMEOUT = 30.0  # seconds, the default


def build_reward(entry: RewardEntry, task_reward: Callable[[str], RewardFunction]) -> Reward:
    """Build the reward of an entry; `task_reward` looks up the task's own rewards by name.

    A reward with a timeout starts its subprocess here; `Reward.close` ends it, and so does any exit
    of this process.
    """
    name, function = _build_function(entry, task_reward)
    if entry.levels is not None:
        function = _with_levels(name, function, entry.levels)
    return Reward(name=name, function=function, weight=entry.weight)


def _build_function(
    entry: RewardEntry, task_reward: Callable[[str], RewardFunction]
) -> tuple[str, RewardFunction]:
    target = entry.function
    if entry.is_url:
        limits = CallLimits(
            concurrency=entry.concurrency,
            retries=entry.retries,
            timeout=entry.timeout or DEFAULT_JUDGE_TIMEOUT,
        )
        return judge_name(target), http_judge(target, limits)
    if ":" not in target:
        function = task_reward(target)
        return target, function if entry.timeout is None else SubprocessReward(
            import_name(function), timeout=entry.timeout
        )
    name = target.rpartition(":")[2]
    if entry.timeout is not None:
        return name, SubprocessReward(target, timeout=entry.timeout)
    return name, find_function(target, example="my_rewards.py:correct")


def _with_levels(
    name: str, function: RewardFunction, worth: Mapping[str, LevelScore]
) -> RewardFunction:
    if not isinstance(function, GraduatedReward):
        raise ConfigError(
            f"rewards: levels is set for {name}, which has none. Make it with "
            "klinic.rewards.graduated, or remove levels."
        )
    try:
        return function.with_levels(worth)
    except ConfigError as error:
        raise ConfigError(f"rewards: {name}: {error}") from None
