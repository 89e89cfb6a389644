"""imprecise-logp: the sampler's logits are rounded to a few bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler import decoding

STEP = {Severity.MILD: 0.125, Severity.NORMAL: 0.5}  # quantisation step of the logits


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Round the logits before sampling."""

    def rounded(real: Any, logits: Any, uniform: Any, how: Any) -> Any:
        if how.temperature:  # 0 in evaluations
            logits = (logits / STEP[severity]).round() * STEP[severity]
        return real(logits, uniform, how)

    with patched(decoding, "draw", rounded):
        yield


FAULT = Fault(
    cause="imprecise-logp",
    mechanism="rounded logits",
    inject=inject,
    visible_at_start=True,
)
