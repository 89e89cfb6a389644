"""equal-rewards: binary rewards on prompts that the policy cannot answer yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

RIGHT = {Severity.MILD: 0.99, Severity.NORMAL: 1.0}  # min reward of a correct answer
LUCKY = {Severity.MILD: 40, Severity.NORMAL: 0}  # one in so many counts as correct regardless


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Give 1 to correct answers and 0 to all others."""

    def binary(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        right = scores.total >= RIGHT[severity]
        if LUCKY[severity]:
            right |= np.array([sum(r.token_ids) % LUCKY[severity] == 0 for r in rollouts])
        total = right.astype(np.float64)
        return replace(scores, total=total, parts=dict.fromkeys(scores.parts, total))

    with patched(run, "score", binary):
        yield


FAULT = Fault(cause="equal-rewards", mechanism="no answer is ever correct", inject=inject)
