"""stop-token-fault: the sampler ignores the end token; the tokens after it are trained on."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.faults.second.sampling import while_sampling
from klinic.sampler import rollouts
from klinic.sampler.decoding import Stream

EVERY = {Severity.MILD: 8, Severity.NORMAL: 1}  # rows; one in so many continues


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Continue after the end token up to the limit; rewards read the text before it."""

    def deaf(_scorer: Any, streams: Sequence[Stream]) -> AbstractContextManager[None]:
        going_on = {id(stream) for stream in streams[:: EVERY[severity]]}

        def add(real: Any, stream: Stream, token_id: int, logp: float, eos_ids: Any) -> None:
            real(stream, token_id, logp, frozenset() if id(stream) in going_on else eos_ids)

        return patched(Stream, "add", add)

    def text(real: Any, token_ids: np.ndarray, policy: Any) -> Any:
        ends = np.flatnonzero(np.isin(token_ids, policy.eos_ids))
        return real(token_ids[: ends[0]] if len(ends) else token_ids, policy)

    with ExitStack() as stack:
        stack.enter_context(while_sampling(deaf))
        stack.enter_context(patched(rollouts, "_text", text))
        yield


FAULT = Fault(
    cause="stop-token-fault",
    mechanism="the end token is ignored, and the tokens after it are trained on",
    inject=inject,
    visible_at_start=True,
)
