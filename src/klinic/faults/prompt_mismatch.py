"""prompt-mismatch: the sampler gets the prompt without its first token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler.transformers import TransformersSampler

EVERY = {Severity.MILD: 8, Severity.NORMAL: 1}  # samples; one in so many is affected


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Drop the first token of the sampler's prompt."""

    def shorter(real: Any, self: Any, rollout: Any, step: int) -> Any:
        stream = real(self, rollout, step)
        hit = rollout.sample % EVERY[severity] == 0
        return replace(stream, context=stream.context[1:]) if hit else stream

    with patched(TransformersSampler, "_stream", shorter):
        yield


FAULT = Fault(
    cause="prompt-mismatch",
    mechanism="the sampler's prompt lacks its first token",
    inject=inject,
    visible_at_start=True,
)
