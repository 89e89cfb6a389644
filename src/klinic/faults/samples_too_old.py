"""samples-too-old: batches wait in a queue before they are trained on."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import step

WAITING = {Severity.MILD: 1, Severity.NORMAL: 3}  # batches


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Return the batch that was sampled several updates ago."""
    queue: deque[Any] = deque()

    def delayed(real: Any, parts: Any, **how: Any) -> Any:
        queue.append(real(parts, **how))
        return queue.popleft() if len(queue) > WAITING[severity] else queue[0]

    with patched(step, "gather", delayed):
        yield


FAULT = Fault(cause="samples-too-old", mechanism="a batch queue before the learner", inject=inject)
