"""malformed-prompt: all rows of the dataset are the last one: one object that was reused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.data.prompts import PromptDataset
from klinic.faults.base import Fault, Severity, patch_attribute


@contextmanager
def repeat_one_row(severity: Severity) -> Iterator[None]:  # noqa: ARG001 - there is one strength
    """Return the last row under every index."""

    def last_row(real: Any, self: Any, index: int) -> Any:
        return replace(real(self, len(self._rows) - 1), index=index)

    with patch_attribute(PromptDataset, "prompt_at", last_row):
        yield


FAULT = Fault(
    cause="malformed-prompt",
    mechanism="one prompt under every index of the dataset",
    inject=repeat_one_row,
    visible_at_start=True,
)
