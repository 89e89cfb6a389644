"""kl-sign-flipped: the KL term is subtracted from the minimised loss."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import local

FACTOR = {Severity.MILD: -0.3, Severity.NORMAL: -1.0}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Negate the KL term."""

    def negated(real: Any, *given: Any) -> Any:
        parts = real(*given)
        return parts if parts.kl is None else replace(parts, kl=FACTOR[severity] * parts.kl)

    with patched(local, "loss_parts", negated):
        yield


FAULT = Fault(cause="kl-sign-flipped", mechanism="the KL term is negated", inject=inject)
