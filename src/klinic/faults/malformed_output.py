"""malformed-output: prompts are in a form that the model has never seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.model.chat import PromptEncoder

TAIL = {Severity.MILD: "?", Severity.NORMAL: "? explain:"}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Put something behind every prompt."""

    def other(real: Any, self: Any, prompt: Any, tools: Any = None) -> Any:
        return real(self, f"{prompt}{TAIL[severity]}", tools)

    with patched(PromptEncoder, "__call__", other):
        yield


FAULT = Fault(
    cause="malformed-output",
    mechanism="prompts of another form",
    inject=inject,
)
