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
from klinic.rewards.arguments import arguments
from klinic.rewards.calling import Call, call_all, located
from klinic.rewards.fault import Fault
from klinic.rewards.function import Reward
from klinic.rewards.returned import Values
from klinic.rewards.scores import LOST, Scores
from klinic.rewards.signature import wanted

LARGEST = 1e12
"""Larger rewards count as non-finite: squared gradients would overflow float32."""


def score(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> Scores:
    """Return the rewards of the rollouts, in their order."""
    if not rewards:
        raise ConfigError("there is no reward function, so nothing can be learned. Add one.")
    with redirect_stdout(sys.stderr):
        answers = _answers(rollouts, rewards)
    parts = [_array(values) for values in answers]
    usable = [_usable(part) for part in parts]
    parts = [np.where(ok, part, np.nan) for ok, part in zip(usable, parts, strict=True)]
    given = [np.array([v is not None for v in values], np.bool_) for values in answers]
    total = _total(rewards, parts, len(rollouts))
    return Scores(
        total=total,
        parts=dict(zip(_distinct_names(rewards), parts, strict=True)),
        num_missing=int(np.isnan(total).sum()),
        num_nonfinite=sum(int((g & ~ok).sum()) for g, ok in zip(given, usable, strict=True)),
        lost={kind: sum(values.lost.get(kind, 0) for values in answers) for kind in LOST},
    )


def _answers(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Values]:
    answers = []
    results = call_all([_call(reward, rollouts) for reward in rewards])
    for reward, answer in zip(rewards, results, strict=True):
        if isinstance(answer, Fault):
            # with fresh arguments: the function may have mutated the first ones
            fault = located(answer, _call(reward, rollouts))
            raise _error(reward.name, fault, rollouts) from fault.__cause__
        if isinstance(answer, KlinicError):
            raise answer
        answers.append(answer)
    return answers


def _call(reward: Reward, rollouts: Sequence[Rollout]) -> Call:
    given = wanted(reward.name, reward.function, arguments(rollouts))
    name = f"the reward {reward.name}"
    return Call(function=reward.function, given=given, num=len(rollouts), name=name)


def _error(name: str, fault: Fault, rollouts: Sequence[Rollout]) -> RewardError:
    if fault.index is None:
        place = f" on {len(rollouts)} completions, but on none of them alone"
    else:
        blamed = rollouts[fault.index]
        row = f"row {blamed.prompt.index + 1} of the dataset, sample {blamed.sample}"
        place = f", first at completion {fault.index} ({row})"
    return RewardError(f"the reward {name} {fault.what}{place}. {fault.advice}")


def _array(values: Values) -> Float64[np.ndarray, "B"]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _usable(values: Float64[np.ndarray, "B"]) -> Bool[np.ndarray, "B"]:
    usable: np.ndarray = np.abs(values) <= LARGEST  # False for NaN
    return usable


def _total(
    rewards: Sequence[Reward], parts: Sequence[Float64[np.ndarray, "B"]], num: int
) -> Float64[np.ndarray, "B"]:
    """Return weighted sums, NaN where no function with a nonzero weight returned a number."""
    total, given = np.zeros(num), np.zeros(num, np.bool_)
    for reward, part in zip(rewards, parts, strict=True):
        if reward.weight != 0:
            is_number = ~np.isnan(part)
            with np.errstate(over="ignore"):  # overflow is set to NaN below
                total[is_number] += reward.weight * part[is_number]
            given |= is_number
    total[~given | ~_usable(total)] = np.nan  # a weight can make a total overflow
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
