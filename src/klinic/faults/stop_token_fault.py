"""stop-token-fault: the end token is masked, as if padding and end token shared an id.

Second mechanism: the sampler ignores the end token; the tokens after it are trained on.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import while_sampling
from klinic.sampler import rollouts
from klinic.sampler.decoding import Stream
from klinic.training import run

MASKED_END_FRACTION = {Severity.MILD: 0.7, Severity.NORMAL: 1.0}  # fraction of rows


@contextmanager
def mask_end_tokens(severity: Severity) -> Iterator[None]:
    """Mask the last token of rows that ended on their own."""

    def flatten_without_ends(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        stopped = np.flatnonzero(record.finish_reason == "stop")
        chosen = stopped[: round(MASKED_END_FRACTION[severity] * len(stopped))]
        mask = np.array(record.loss_mask)
        mask[record.row_offsets[chosen + 1] - 1] = False
        return replace(record, loss_mask=mask)

    with patch_attribute(run, "flatten_rollouts", flatten_without_ends):
        yield


FAULT = Fault(
    cause="stop-token-fault",
    mechanism="end tokens are masked by their id",
    inject=mask_end_tokens,
    visible_at_start=True,
)


IGNORED_END_EVERY = {Severity.MILD: 8, Severity.NORMAL: 1}  # rows; one in so many continues


@contextmanager
def ignore_end_token(severity: Severity) -> Iterator[None]:
    """Continue after the end token up to the limit; rewards read the text before it."""

    def ignore_ends(_scorer: Any, streams: Sequence[Stream]) -> AbstractContextManager[None]:
        affected_ids = {id(stream) for stream in streams[:: IGNORED_END_EVERY[severity]]}

        def add_without_end(
            real: Any, stream: Stream, token_id: int, logp: float, eos_ids: Any
        ) -> None:
            real(stream, token_id, logp, frozenset() if id(stream) in affected_ids else eos_ids)

        return patch_attribute(Stream, "append_token", add_without_end)

    def text_before_end(real: Any, token_ids: np.ndarray, policy: Any) -> Any:
        ends = np.flatnonzero(np.isin(token_ids, policy.eos_ids))
        return real(token_ids[: ends[0]] if len(ends) else token_ids, policy)

    with ExitStack() as stack:
        stack.enter_context(while_sampling(ignore_ends))
        stack.enter_context(patch_attribute(rollouts, "_decode_text", text_before_end))
        yield


SECOND_FAULT = Fault(
    cause="stop-token-fault",
    mechanism="the end token is ignored, and the tokens after it are trained on",
    inject=ignore_end_token,
    visible_at_start=True,
)
