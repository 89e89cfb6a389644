"""Schedule of active probes, and the two that need no learner: tokenizer round trip and regrading.

Probes run after 1, 2, 4, 8, ... steps: faults show early or late, and long runs pay little.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool

from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import Rollout
from klinic.rewards.scores import Scores, mean
from klinic.tasks.base import Task

GOLD = 8  # gold answers that a regrade grades


def is_time(step: int) -> bool:
    """Whether a step is one of 1, 2, 4, 8, ...

    >>> [step for step in range(1, 20) if is_time(step)]
    [1, 2, 4, 8, 16]
    """
    return step & (step - 1) == 0


def round_trips(tokenizer: Any, rollouts: Sequence[Rollout]) -> Bool[np.ndarray, "B"]:
    """Return for each rollout whether decoding and re-encoding restores the policy's token ids."""
    return np.array([_round_trips(tokenizer, rollout) for rollout in rollouts], np.bool_)


def _round_trips(tokenizer: Any, rollout: Rollout) -> bool:
    own = [s.token_ids.tolist() for s in rollout.segments if s.emitted_by is EmittedBy.POLICY]
    return all(comes_back(tokenizer, ids) for ids in own)


def comes_back(tokenizer: Any, ids: list[int]) -> bool:
    """Whether token ids are unchanged by decoding and encoding."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return bool(tokenizer.encode(text, add_special_tokens=False) == ids)


def regrade(
    task: Task,
    rollouts: Sequence[Rollout],
    record: StepRecord,
    reward: Callable[[list[Rollout]], Scores],
) -> dict[str, float]:
    """Grade the completions again in reverse order, and grade some gold answers."""
    again = reward([*reversed(rollouts)]).total[::-1]
    first = np.asarray(record.reward, dtype=np.float64)
    right = [task.correct(row_of(r), r.text) for r in rollouts]
    gold = reward([replace(r, text=row_of(r)["answer"]) for r in rollouts[:GOLD]]).total
    return {
        "same": float(np.isclose(again, first, equal_nan=True).mean()),
        "right_answers": mean(gold),
        "wrong_completions": mean(first[~np.array(right)]),
    }


def row_of(rollout: Rollout) -> dict[str, Any]:
    """Return the dataset row of a rollout."""
    return {"prompt": rollout.prompt.text, **rollout.prompt.columns}
