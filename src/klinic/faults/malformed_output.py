"""malformed-output: prompts have a format that the model has never seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.model.chat import PromptEncoder

EVERY = {Severity.MILD: 2, Severity.NORMAL: 1}  # prompts; one in so many is affected


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Pose another task than the reward grades."""

    def other(real: Any, self: Any, prompt: Any, tools: Any = None) -> Any:
        hit = isinstance(prompt, str) and sum(map(ord, prompt)) % EVERY[severity] == 0
        return real(self, _compare(prompt) if hit else prompt, tools)

    with patched(PromptEncoder, "__call__", other):
        yield


def _compare(prompt: str) -> str:
    return f"compare {prompt.rstrip('=').replace('+', ' ')}="


FAULT = Fault(
    cause="malformed-output",
    mechanism="prompts in the format of another skill",
    inject=inject,
)
