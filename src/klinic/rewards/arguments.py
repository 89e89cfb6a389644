"""What a reward function is called with: TRL's names, one list entry a completion."""

from collections.abc import Mapping, Sequence
from typing import Any

from klinic.errors import DataError
from klinic.evidence.rollout import Rollout

OWN = ("prompts", "completions")  # made here, so no column can have these names
KEPT = ("prompt", "completion", "completion_ids")  # columns which TRL does not pass on

Arguments = dict[str, list[Any]]


def arguments(rollouts: Sequence[Rollout]) -> Arguments:
    """Return everything a reward function can be given, in lists that it may change."""
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
        "prompts": [_prompt(rollout) for rollout in rollouts],
        "completions": [_completion(rollout) for rollout in rollouts],
        "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
    }


def _prompt(rollout: Rollout) -> str | list[Any]:
    messages = rollout.prompt.messages
    return rollout.prompt.text if messages is None else [_copied(message) for message in messages]


def _completion(rollout: Rollout) -> str | list[Any]:
    """Return what was said: text to a text, and to a chat its turns, as TRL does."""
    if rollout.prompt.messages is None:
        return rollout.text
    said = rollout.messages or ({"role": "assistant", "content": rollout.text},)
    return [_copied(message) for message in said]


def _copied(value: Any) -> Any:
    """Return lists and dictionaries all the way down, for a function that may change them."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value
