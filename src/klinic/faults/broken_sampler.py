"""broken-sampler: all samples of a prompt share one random stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler import transformers

STREAMS = {Severity.MILD: 4, Severity.NORMAL: 1}  # distinct streams per group


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Give samples the random numbers of other samples."""

    def shared(real: Any, *, sample: int, **how: Any) -> Any:
        return real(sample=sample % STREAMS[severity], **how)

    with patched(transformers, "uniforms", shared):
        yield


FAULT = Fault(
    cause="broken-sampler",
    mechanism="one random stream for a whole group",
    inject=inject,
    visible_at_start=True,
)
