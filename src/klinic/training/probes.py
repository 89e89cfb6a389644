"""The two active probes that need no learner: tokenizer round trip and regrading."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from klinic.evidence.record import EmittedBy, ProbeResult
from klinic.evidence.rollout import Rollout
from klinic.rewards.scores import StepRewards, nan_mean
from klinic.tasks.base import Task

NUM_GOLD_ANSWERS = 8  # gold answers that a regrade grades


def check_round_trips(tokenizer: Any, rollouts: Sequence[Rollout]) -> Bool[np.ndarray, "B"]:
    """Return for each rollout whether decoding and re-encoding restores the policy's token ids."""
    return np.array([_rollout_round_trips(tokenizer, rollout) for rollout in rollouts], np.bool_)


def _rollout_round_trips(tokenizer: Any, rollout: Rollout) -> bool:
    policy_token_ids = [
        s.token_ids.tolist() for s in rollout.segments if s.emitted_by is EmittedBy.POLICY
    ]
    return all(ids_round_trip(tokenizer, ids) for ids in policy_token_ids)


def ids_round_trip(tokenizer: Any, ids: list[int]) -> bool:
    """Whether token ids are unchanged by decoding and encoding."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return bool(tokenizer.encode(text, add_special_tokens=False) == ids)


def regrade_completions(
    task: Task,
    rollouts: Sequence[Rollout],
    rewards: Float64[np.ndarray, "B"],
    score_rollouts: Callable[[list[Rollout]], StepRewards],
) -> ProbeResult:
    """Grade the completions again in reverse order, and grade some gold answers.

    `rewards` are those of the step.
    """
    regraded = score_rollouts([*reversed(rollouts)]).total[::-1]
    is_correct = [task.is_correct(dataset_row(r), r.text) for r in rollouts]
    gold_rewards = score_rollouts(
        [replace(r, text=dataset_row(r)["answer"]) for r in rollouts[:NUM_GOLD_ANSWERS]]
    ).total
    return {
        "same": float(np.isclose(regraded, rewards, equal_nan=True).mean()),
        "right_answers": nan_mean(gold_rewards),
        "wrong_completions": nan_mean(rewards[~np.array(is_correct)]),
    }


def dataset_row(rollout: Rollout) -> dict[str, Any]:
    """Return the dataset row of a rollout."""
    return {"prompt": rollout.prompt.text, **rollout.prompt.columns}
