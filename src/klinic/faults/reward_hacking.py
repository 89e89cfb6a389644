"""reward-hacking: a bonus for length that conflicts with the answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

BONUS = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}  # per token


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Reward every written token."""

    def longer(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        length = np.array([r.num_policy_tokens for r in rollouts], dtype=np.float64)
        return replace(scores, total=scores.total + BONUS[severity] * length)

    with patched(run, "score", longer):
        yield


FAULT = Fault(
    cause="reward-hacking",
    mechanism="a bonus for length",
    inject=inject,
    settings={
        "warm_start.steps": 600,
        "loop.max_steps": 30,
        "loop.eval_every": 10,
        "loop.eval_prompts": 100,
        "kl.coef": 0.001,
        "learner.learning_rate": 1e-3,
    },
)
