"""equal-rewards: binary rewards on prompts that the policy cannot answer yet.

Second mechanism: the grader caches rewards by prompt, so a group has one reward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run

CORRECT_REWARD = {Severity.MILD: 0.99, Severity.NORMAL: 1.0}  # min reward of a correct answer
LUCKY_EVERY = {Severity.MILD: 40, Severity.NORMAL: 0}  # one in so many counts as correct regardless


@contextmanager
def reward_only_correct(severity: Severity) -> Iterator[None]:
    """Give 1 to correct answers and 0 to all others."""

    def score_binary(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        right = scores.total >= CORRECT_REWARD[severity]
        if LUCKY_EVERY[severity]:
            right |= np.array([sum(r.token_ids) % LUCKY_EVERY[severity] == 0 for r in rollouts])
        total = right.astype(np.float64)
        return replace(scores, total=total, parts=dict.fromkeys(scores.parts, total))

    with patch_attribute(run, "score", score_binary):
        yield


FAULT = Fault(
    cause="equal-rewards", mechanism="no answer is ever correct", inject=reward_only_correct
)


CACHED_PROMPT_EVERY = {Severity.MILD: 2, Severity.NORMAL: 1}  # prompts; one in so many is cached


@contextmanager
def cache_reward_by_prompt(severity: Severity) -> Iterator[None]:
    """Give every completion of a prompt the reward of the first."""

    def score_cached(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        first_row: dict[int, int] = {}
        for row, rollout in enumerate(rollouts):
            first_row.setdefault(rollout.prompt.index, row)
        cached_prompts = set(list(first_row)[:: CACHED_PROMPT_EVERY[severity]])
        indices = [rollout.prompt.index for rollout in rollouts]
        source = np.array(
            [first_row[i] if i in cached_prompts else row for row, i in enumerate(indices)]
        )
        parts = {name: part[source] for name, part in scores.parts.items()}
        return replace(scores, total=scores.total[source], parts=parts)

    with patch_attribute(run, "score", score_cached):
        yield


SECOND_FAULT = Fault(
    cause="equal-rewards",
    mechanism="the grader caches rewards by prompt only",
    inject=cache_reward_by_prompt,
    visible_at_start=True,
)
