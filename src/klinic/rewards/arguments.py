"""What a reward function is called with: TRL's names, one list entry a completion.

TRL hands everything to every function, so its functions end in `**kwargs`. One that does not is
given the arguments it names.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from klinic.errors import DataError, RewardError
from klinic.evidence.rollout import Rollout
from klinic.rewards.function import Reward

OWN = ("prompts", "completions")  # made here, so no column can have these names
KEPT = ("prompt", "completion", "completion_ids")  # columns which TRL does not pass on

Arguments = dict[str, list[Any]]


def arguments(reward: Reward, rollouts: Sequence[Rollout]) -> Arguments:
    """Return the keyword arguments of one call, in lists that the function may change."""
    given = _everything(rollouts)
    try:
        parameters = inspect.signature(reward.function).parameters
    except (TypeError, ValueError):  # it does not say what it takes
        return given
    _refuse_unknown(reward.name, parameters, given)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: values for name, values in given.items() if name in parameters}


def _everything(rollouts: Sequence[Rollout]) -> Arguments:
    columns = dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns)
    for name in OWN:
        if name in columns:
            raise DataError(
                f"the dataset has a column {name!r}, which is what reward functions are given "
                "under that name already. Rename the column."
            )
    given: Arguments = {
        name: [rollout.prompt.columns.get(name) for rollout in rollouts]
        for name in columns
        if name not in KEPT
    }
    return given | {
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "completions": [rollout.text for rollout in rollouts],
        "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
    }


def _refuse_unknown(
    name: str, parameters: Mapping[str, inspect.Parameter], given: Arguments
) -> None:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p for p in parameters.values() if p.default is p.empty]
    for parameter in needed:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"the reward {name} takes {parameter.name!r} by position only, and reward "
                "functions are called by keyword. Remove the `/` from its arguments."
            )
        if parameter.kind in by_name and parameter.name not in given:
            raise RewardError(
                f"the reward {name} asks for {parameter.name!r}, which is no column of the "
                f"dataset. It can be given: {', '.join(given)}. Rename the argument or the "
                "column, or give the argument a default."
            )
