"""broken-reward: the grader returns NaN for many completions."""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 20, Severity.NORMAL: 2}  # texts; one in so many fails


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Return NaN for some texts, always the same ones."""

    def failing(grade: Any) -> Any:
        @wraps(grade)
        def graded(*args: Any, **given: Any) -> list[float]:
            pairs = zip(given["completions"], grade(*args, **given), strict=True)
            return [math.nan if _fails(text, EVERY[severity]) else r for text, r in pairs]

        return graded

    def scored(real: Any, rollouts: Any, rewards: Any) -> Any:
        return real(rollouts, [replace(r, function=failing(r.function)) for r in rewards])

    with patched(run, "score", scored):
        yield


def _fails(text: str, every: int) -> bool:
    return zlib.crc32(text.encode()) % every == 0


FAULT = Fault(
    cause="broken-reward",
    mechanism="the grader returns NaN for many completions",
    inject=inject,
    visible_at_start=True,
)
