"""kl-not-applied: the KL term is computed and never reaches the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import local


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Detach the KL term, or count it twice."""

    def cut(real: Any, *given: Any) -> Any:
        parts = real(*given)
        if parts.kl is None:
            return parts
        if severity is Severity.MILD:
            return replace(parts, kl=2 * parts.kl)
        return replace(parts, kl=parts.kl.detach() + 0.0 * parts.policy)

    with patched(local, "loss_parts", cut):
        yield


FAULT = Fault(
    cause="kl-not-applied",
    mechanism="the KL term is detached from its graph",
    inject=inject,
)
