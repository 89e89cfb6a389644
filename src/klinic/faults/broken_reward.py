"""broken-reward: every completion gets the reward of its neighbour."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

SHARE = {Severity.MILD: 0.25, Severity.NORMAL: 1.0}  # fraction of completions


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Shift the rewards by one completion."""

    def rolled(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        num = round(SHARE[severity] * len(rollouts))
        order = np.concatenate([np.roll(np.arange(num), 1), np.arange(num, len(rollouts))])
        parts = {name: part[order] for name, part in scores.parts.items()}
        return replace(scores, total=scores.total[order], parts=parts)

    with patched(run, "score", rolled):
        yield


FAULT = Fault(
    cause="broken-reward",
    mechanism="rewards of the previous completion",
    inject=inject,
    visible_at_start=True,
)
