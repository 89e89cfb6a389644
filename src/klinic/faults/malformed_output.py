"""malformed-output: prompts have a format that the model has never seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.model.chat import PromptEncoder

CHANGED_PROMPT_EVERY = {Severity.MILD: 2, Severity.NORMAL: 1}  # prompts; one in so many is affected


@contextmanager
def change_prompt_format(severity: Severity) -> Iterator[None]:
    """Pose another task than the reward grades."""

    def encode_other_format(real: Any, self: Any, prompt: Any, tools: Any = None) -> Any:
        is_affected = (
            isinstance(prompt, str) and sum(map(ord, prompt)) % CHANGED_PROMPT_EVERY[severity] == 0
        )
        return real(self, _comparison_prompt(prompt) if is_affected else prompt, tools)

    with patch_attribute(PromptEncoder, "__call__", encode_other_format):
        yield


def _comparison_prompt(prompt: str) -> str:
    return f"compare {prompt.rstrip('=').replace('+', ' ')}="


FAULT = Fault(
    cause="malformed-output",
    mechanism="prompts in the format of another skill",
    inject=change_prompt_format,
)
