"""reward-hacking: a bonus for length that conflicts with the answer.

Second mechanism: a format reward outweighs the reward for the answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run

LENGTH_BONUS = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}  # per token


@contextmanager
def reward_length(severity: Severity) -> Iterator[None]:
    """Reward every written token."""

    def score_with_length(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        length = np.array([r.num_policy_tokens for r in rollouts], dtype=np.float64)
        return replace(scores, total=scores.total + LENGTH_BONUS[severity] * length)

    with patch_attribute(run, "score", score_with_length):
        yield


FAULT = Fault(
    cause="reward-hacking",
    mechanism="a bonus for length",
    inject=reward_length,
    settings={
        "warm_start.steps": 600,
        "loop.max_steps": 30,
        "loop.eval_every": 10,
        "loop.eval_prompts": 100,
        "kl.coef": 0.001,
        "learner.learning_rate": 1e-3,
    },
)


FORMAT_MARKER = ">"  # required first character of an answer
FORMAT_REWARD = {Severity.MILD: 0.05, Severity.NORMAL: 2.0}


@contextmanager
def reward_format(severity: Severity) -> Iterator[None]:
    """Add a reward for completions that start with a marker."""

    def score_with_format(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        format_reward = np.array(
            [FORMAT_REWARD[severity] * r.text.startswith(FORMAT_MARKER) for r in rollouts],
            np.float64,
        )
        return replace(
            scores,
            total=scores.total + format_reward,
            parts={**scores.parts, "form": format_reward},
        )

    with patch_attribute(run, "score", score_with_format):
        yield


SECOND_FAULT = Fault(
    cause="reward-hacking",
    mechanism="a format reward outweighs the reward for the answer",
    inject=reward_format,
    settings={
        "data.skill": "comparing",
        "warm_start.steps": 400,
        "learner.learning_rate": 5e-4,
        "loop.max_steps": 12,
        "loop.eval_prompts": 64,
    },
)
