"""reward-hacking: a format reward outweighs the reward for the answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

FORM = ">"  # required first character of an answer
PAID = {Severity.MILD: 0.05, Severity.NORMAL: 2.0}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Add a reward for completions that start with a marker."""

    def formal(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        form = np.array([PAID[severity] * r.text.startswith(FORM) for r in rollouts], np.float64)
        return replace(scores, total=scores.total + form, parts={**scores.parts, "form": form})

    with patched(run, "score", formal):
        yield


FAULT = Fault(
    cause="reward-hacking",
    mechanism="a format reward outweighs the reward for the answer",
    inject=inject,
    settings={
        "data.skill": "comparing",
        "warm_start.steps": 400,
        "learner.learning_rate": 5e-4,
        "loop.max_steps": 12,
        "loop.eval_prompts": 64,
    },
)
