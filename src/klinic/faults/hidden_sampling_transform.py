"""hidden-sampling-transform: top-p that the recipe does not know of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler import decoding

TOP_P = {Severity.MILD: 0.95, Severity.NORMAL: 0.8}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Draw from fewer outcomes, and report log-probs among them."""

    def narrower(real: Any, logits: Any, uniform: Any, how: Any) -> Any:
        if how.temperature:  # else an evaluation
            how = replace(how, top_p=TOP_P[severity])
        return real(logits, uniform, how)

    with patched(decoding, "draw", narrower):
        yield


FAULT = Fault(
    cause="hidden-sampling-transform",
    mechanism="top-p from somewhere else",
    inject=inject,
    visible_at_start=True,
)
