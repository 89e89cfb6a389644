"""broken-sampler: logits of some rows become NaN, and the engine emits token 0 to the end."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.faults.second.sampling import while_sampling
from klinic.sampler.decoding import Stream

EVERY = {Severity.MILD: 32, Severity.NORMAL: 4}  # rows; one in so many breaks after its first token


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Emit token 0 without a log-prob once a row is broken."""

    def broken(_scorer: Any, streams: Sequence[Stream]) -> AbstractContextManager[None]:
        lost = {id(stream) for stream in streams[:: EVERY[severity]]}

        def add(real: Any, stream: Stream, token_id: int, logp: float, eos_ids: Any) -> None:
            if id(stream) in lost and stream.token_ids:
                token_id, logp = 0, math.nan
            real(stream, token_id, logp, eos_ids)

        return patched(Stream, "add", add)

    with while_sampling(broken):
        yield


FAULT = Fault(
    cause="broken-sampler",
    mechanism="rows whose logits become NaN continue with token 0",
    inject=inject,
    visible_at_start=True,
)
