"""Builds the arguments of reward functions: TRL's names, one list entry per completion."""

from collections.abc import Mapping, Sequence
from typing import Any

from klinic.errors import DataError
from klinic.evidence.rollout import Rollout

RESERVED_NAMES = ("prompts", "completions")  # set here, so columns cannot have these names
UNPASSED_COLUMNS = (
    "prompt",
    "completion",
    "completion_ids",
)  # columns that TRL does not pass to rewards

Arguments = dict[str, list[Any]]


def reward_arguments(rollouts: Sequence[Rollout]) -> Arguments:
    """Return all arguments of a reward function, in fresh lists that it may mutate."""
    columns = dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns)
    for name in RESERVED_NAMES:
        if name in columns:
            raise DataError(
                f"the dataset has a column {name!r}, a name that is reserved for an argument of "
                "reward functions. Rename the column."
            )
    kwargs: Arguments = {
        name: [rollout.prompt.columns.get(name) for rollout in rollouts]
        for name in columns
        if name not in UNPASSED_COLUMNS
    }
    return kwargs | {
        "prompts": [_prompt_argument(rollout) for rollout in rollouts],
        "completions": [_completion_argument(rollout) for rollout in rollouts],
        "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
    }


def _prompt_argument(rollout: Rollout) -> str | list[Any]:
    messages = rollout.prompt.messages
    return (
        rollout.prompt.text if messages is None else [_deep_copy(message) for message in messages]
    )


def _completion_argument(rollout: Rollout) -> str | list[Any]:
    """Return the completion as TRL does: text for a text prompt, messages for a chat."""
    if rollout.prompt.messages is None:
        return rollout.text
    messages = rollout.messages or ({"role": "assistant", "content": rollout.text},)
    return [_deep_copy(message) for message in messages]


def _deep_copy(value: Any) -> Any:
    """Deep-copy mappings and sequences to dictionaries and lists that a function may mutate."""
    if isinstance(value, Mapping):
        return {key: _deep_copy(inner) for key, inner in value.items()}
    return [_deep_copy(inner) for inner in value] if isinstance(value, list | tuple) else value
