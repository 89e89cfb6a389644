"""hidden-sampling-transform: top-p that the recipe does not declare."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler import decoding

TOP_P = {Severity.MILD: 0.95, Severity.NORMAL: 0.8}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Sample from the top-p subset, and report log-probs renormalised within it."""

    def narrower(real: Any, logits: Any, uniform: Any, how: Any) -> Any:
        if how.temperature:  # 0 in evaluations
            how = replace(how, top_p=TOP_P[severity])
        return real(logits, uniform, how)

    with patched(decoding, "draw", narrower):
        yield


FAULT = Fault(
    cause="hidden-sampling-transform",
    mechanism="top-p that the recipe does not declare",
    inject=inject,
    visible_at_start=True,
)
