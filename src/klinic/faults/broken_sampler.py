"""broken-sampler: all samples of a prompt share one random stream.

Second mechanism: logits of some rows become NaN, and the engine emits token 0 to the end.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import while_sampling
from klinic.sampler import random_streams
from klinic.sampler.decoding import Stream

NUM_STREAMS = {Severity.MILD: 4, Severity.NORMAL: 1}  # distinct streams per group


@contextmanager
def share_random_streams(severity: Severity) -> Iterator[None]:
    """Give samples the random numbers of other samples."""

    def shared_uniforms(real: Any, *, sample: int, **options: Any) -> Any:
        return real(sample=sample % NUM_STREAMS[severity], **options)

    with patch_attribute(random_streams, "uniforms", shared_uniforms):
        yield


FAULT = Fault(
    cause="broken-sampler",
    mechanism="one random stream for a whole group",
    inject=share_random_streams,
    visible_at_start=True,
)


# rows; one in so many breaks after its first token
BROKEN_ROW_EVERY = {
    Severity.MILD: 32,
    Severity.NORMAL: 4,
}


@contextmanager
def break_sampled_rows(severity: Severity) -> Iterator[None]:
    """Emit token 0 without a log-prob once a row is broken."""

    def break_streams(_scorer: Any, streams: Sequence[Stream]) -> AbstractContextManager[None]:
        broken_ids = {id(stream) for stream in streams[:: BROKEN_ROW_EVERY[severity]]}

        def add_broken(real: Any, stream: Stream, token_id: int, logp: float, eos_ids: Any) -> None:
            if id(stream) in broken_ids and stream.token_ids:
                token_id, logp = 0, math.nan
            real(stream, token_id, logp, eos_ids)

        return patch_attribute(Stream, "append_token", add_broken)

    with while_sampling(break_streams):
        yield


SECOND_FAULT = Fault(
    cause="broken-sampler",
    mechanism="rows whose logits become NaN continue with token 0",
    inject=break_sampled_rows,
    visible_at_start=True,
)
