"""cliff-rewards: binary rewards of which almost none is positive."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run

LOWEST_FRACTION = {Severity.MILD: 0.9, Severity.NORMAL: 0.97}  # fraction with the lowest reward


@contextmanager
def binarise_at_top(severity: Severity) -> Iterator[None]:
    """Give 1 to the few best completions of a step and -1 to all others."""

    def score_steeply(real: Any, rollouts: Any, rewards: Any) -> Any:
        scores = real(rollouts, rewards)
        num_best = max(1, round((1 - LOWEST_FRACTION[severity]) * len(rollouts)))
        best = np.zeros(len(rollouts), dtype=bool)
        best[np.argsort(-np.nan_to_num(scores.total), kind="stable")[:num_best]] = True
        return replace(scores, total=np.where(best, 1.0, -1.0))

    with patch_attribute(run, "score", score_steeply):
        yield


FAULT = Fault(
    cause="cliff-rewards", mechanism="1 for a few, -1 for all others", inject=binarise_at_top
)
