"""context-truncated: the length limit is shorter than an answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler.transformers import TransformersSampler

LIMIT = {Severity.MILD: 2, Severity.NORMAL: 1}  # tokens


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Lower the length limit of completions."""

    def short(real: Any, self: Any, *given: Any, **how: Any) -> None:
        real(self, *given, **{**how, "max_new_tokens": LIMIT[severity]})

    with patched(TransformersSampler, "__init__", short):
        yield


FAULT = Fault(
    cause="context-truncated",
    mechanism="a limit of one token",
    inject=inject,
)
