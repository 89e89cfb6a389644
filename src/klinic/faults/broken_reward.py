"""broken-reward: every completion gets the reward of its neighbour.

Second mechanism: the grader returns NaN for many completions.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run

SHIFTED_FRACTION = {Severity.MILD: 0.25, Severity.NORMAL: 1.0}  # fraction of completions


@contextmanager
def shift_rewards(severity: Severity) -> Iterator[None]:
    """Shift the rewards by one completion."""

    def score_shifted(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        num = round(SHIFTED_FRACTION[severity] * len(rollouts))
        order = np.concatenate([np.roll(np.arange(num), 1), np.arange(num, len(rollouts))])
        parts = {name: part[order] for name, part in scores.parts.items()}
        return replace(scores, total=scores.total[order], parts=parts)

    with patch_attribute(run, "score", score_shifted):
        yield


FAULT = Fault(
    cause="broken-reward",
    mechanism="rewards of the previous completion",
    inject=shift_rewards,
    visible_at_start=True,
)


NAN_EVERY = {Severity.MILD: 20, Severity.NORMAL: 2}  # texts; one in so many fails


@contextmanager
def return_nan_rewards(severity: Severity) -> Iterator[None]:
    """Return NaN for some texts, always the same ones."""

    def failing_reward(grade: Any) -> Any:
        @wraps(grade)
        def grade_with_nan(*args: Any, **kwargs: Any) -> list[float]:
            pairs = zip(kwargs["completions"], grade(*args, **kwargs), strict=True)
            return [math.nan if _is_nan_text(text, NAN_EVERY[severity]) else r for text, r in pairs]

        return grade_with_nan

    def score_with_nan(real: Any, rollouts: Any, rewards: Any) -> Any:
        return real(rollouts, [replace(r, function=failing_reward(r.function)) for r in rewards])

    with patch_attribute(run, "score", score_with_nan):
        yield


def _is_nan_text(text: str, every: int) -> bool:
    return zlib.crc32(text.encode()) % every == 0


SECOND_FAULT = Fault(
    cause="broken-reward",
    mechanism="the grader returns NaN for many completions",
    inject=return_nan_rewards,
    visible_at_start=True,
)
