"""equal-rewards: all or nothing on prompts that nobody can answer yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

RIGHT = {Severity.MILD: 0.99, Severity.NORMAL: 1.0}  # the least that counts as right
LUCKY = {Severity.MILD: 40, Severity.NORMAL: 0}  # one of so many counts as right whatever it is


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Give 1 to what is right and 0 to everything else."""

    def binary(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        right = scores.total >= RIGHT[severity]
        if LUCKY[severity]:
            right |= np.array([sum(r.token_ids) % LUCKY[severity] == 0 for r in rollouts])
        total = right.astype(np.float64)
        return replace(scores, total=total, parts=dict.fromkeys(scores.parts, total))

    with patched(run, "score", binary):
        yield


FAULT = Fault(cause="equal-rewards", mechanism="nobody is ever right", inject=inject)
