"""cliff-rewards: binary rewards of which almost none is positive."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

ALL = {Severity.MILD: 0.9, Severity.NORMAL: 0.97}  # fraction with the lowest reward


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Give 1 to the few best completions of a step and -1 to all others."""

    def steep(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        few = max(1, round((1 - ALL[severity]) * len(rollouts)))
        best = np.zeros(len(rollouts), dtype=bool)
        best[np.argsort(-np.nan_to_num(scores.total), kind="stable")[:few]] = True
        return replace(scores, total=np.where(best, 1.0, -1.0))

    with patched(run, "score", steep):
        yield


FAULT = Fault(cause="cliff-rewards", mechanism="1 for a few, -1 for all others", inject=inject)
