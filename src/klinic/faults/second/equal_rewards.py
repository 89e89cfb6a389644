"""equal-rewards: the grader caches rewards by prompt, so a group has one reward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 2, Severity.NORMAL: 1}  # prompts; one in so many is cached


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Give every completion of a prompt the reward of the first."""

    def remembered(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        first: dict[int, int] = {}
        for row, rollout in enumerate(rollouts):
            first.setdefault(rollout.prompt.index, row)
        known = set(list(first)[:: EVERY[severity]])
        indices = [rollout.prompt.index for rollout in rollouts]
        source = np.array([first[i] if i in known else row for row, i in enumerate(indices)])
        parts = {name: part[source] for name, part in scores.parts.items()}
        return replace(scores, total=scores.total[source], parts=parts)

    with patched(run, "score", remembered):
        yield


FAULT = Fault(
    cause="equal-rewards",
    mechanism="the grader caches rewards by prompt only",
    inject=inject,
    visible_at_start=True,
)
