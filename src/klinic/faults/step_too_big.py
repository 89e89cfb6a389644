"""step-too-big: the learning rate is thirty times the usual one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.update import LearningRate

TIMES = {Severity.MILD: 10.0, Severity.NORMAL: 30.0}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Multiply the learning rate of every update."""

    def larger(real: Any, self: Any, num_updates: int) -> float:
        return TIMES[severity] * float(real(self, num_updates))

    with patched(LearningRate, "at", larger):
        yield


FAULT = Fault(cause="step-too-big", mechanism="learning rate times 30", inject=inject)
