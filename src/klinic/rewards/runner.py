"""Calls all reward functions on the rollouts of a step.

Exceptions, hangs and malformed results never become a reward. Output that functions print goes to
stderr: stdout belongs to the command.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import count

import numpy as np
from jaxtyping import Bool, Float64

from klinic.errors import ConfigError, KlinicError, RewardError
from klinic.evidence.rollout import Rollout
from klinic.rewards.arguments import reward_arguments
from klinic.rewards.function import Reward
from klinic.rewards.invoke import RewardCall, invoke_all, locate_fault
from klinic.rewards.parse_result import RewardFault, RewardValues
from klinic.rewards.scores import LOST_REASONS, StepRewards
from klinic.rewards.signature import accepted_arguments

MAX_REWARD = 1e12
"""Larger rewards count as non-finite: squared gradients would overflow float32."""


def score(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> StepRewards:
    """Return the rewards of the rollouts, in their order."""
    if not rewards:
        raise ConfigError("there is no reward function, so nothing can be learned. Add one.")
    with redirect_stdout(sys.stderr):
        answers = _collect_values(rollouts, rewards)
    parts = [_values_array(values) for values in answers]
    usable = [_is_usable(part) for part in parts]
    parts = [np.where(ok, part, np.nan) for ok, part in zip(usable, parts, strict=True)]
    returned = [np.array([v is not None for v in values], np.bool_) for values in answers]
    total = _weighted_total(rewards, parts, len(rollouts))
    return StepRewards(
        total=total,
        parts=dict(zip(_distinct_names(rewards), parts, strict=True)),
        num_missing=int(np.isnan(total).sum()),
        num_nonfinite=sum(int((g & ~ok).sum()) for g, ok in zip(returned, usable, strict=True)),
        lost={kind: sum(values.lost.get(kind, 0) for values in answers) for kind in LOST_REASONS},
    )


def _collect_values(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[RewardValues]:
    answers = []
    results = invoke_all([_make_call(reward, rollouts) for reward in rewards])
    for reward, answer in zip(rewards, results, strict=True):
        if isinstance(answer, RewardFault):
            # with fresh arguments: the function may have mutated the first ones
            fault = locate_fault(answer, _make_call(reward, rollouts))
            raise _reward_error(reward.name, fault, rollouts) from fault.__cause__
        if isinstance(answer, KlinicError):
            raise answer
        answers.append(answer)
    return answers


def _make_call(reward: Reward, rollouts: Sequence[Rollout]) -> RewardCall:
    kwargs = accepted_arguments(reward.name, reward.function, reward_arguments(rollouts))
    name = f"the reward {reward.name}"
    return RewardCall(function=reward.function, kwargs=kwargs, num=len(rollouts), name=name)


def _reward_error(name: str, fault: RewardFault, rollouts: Sequence[Rollout]) -> RewardError:
    if fault.index is None:
        location = f"; with each of the {len(rollouts)} completions alone it does not fail"
    else:
        blamed = rollouts[fault.index]
        row = f"row {blamed.prompt.index + 1} of the dataset, sample {blamed.sample}"
        location = f", first at completion {fault.index} ({row})"
    return RewardError(f"the reward {name} {fault.what}{location}. {fault.advice}")


def _values_array(values: RewardValues) -> Float64[np.ndarray, "B"]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _is_usable(values: Float64[np.ndarray, "B"]) -> Bool[np.ndarray, "B"]:
    usable: np.ndarray = np.abs(values) <= MAX_REWARD  # False for NaN
    return usable


def _weighted_total(
    rewards: Sequence[Reward], parts: Sequence[Float64[np.ndarray, "B"]], num: int
) -> Float64[np.ndarray, "B"]:
    """Return weighted sums, NaN where no function with a nonzero weight returned a number."""
    total, has_value = np.zeros(num), np.zeros(num, np.bool_)
    for reward, part in zip(rewards, parts, strict=True):
        if reward.weight != 0:
            is_number = ~np.isnan(part)
            with np.errstate(over="ignore"):  # overflow is set to NaN below
                total[is_number] += reward.weight * part[is_number]
            has_value |= is_number
    total[~has_value | ~_is_usable(total)] = np.nan  # a weight can make a total overflow
    return total


def _distinct_names(rewards: Sequence[Reward]) -> list[str]:
    """Return unique names: the second `length` becomes `length_2`.

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
