"""layout-changes-logp: rows are packed in pairs, and the second attends to the first."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import packing

EVERY = {Severity.MILD: 8, Severity.NORMAL: 2}  # rows; one in so many is packed after its neighbour


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Prepend the previous row to a row's prompt."""

    def packed(real: Any, prompts: Sequence[Any], completions: Sequence[Any], **how: Any) -> Any:
        seen = [
            np.concatenate([prompts[i - 1], completions[i - 1], prompt])
            if i % EVERY[severity] == EVERY[severity] - 1
            else prompt
            for i, prompt in enumerate(prompts)
        ]
        return real(seen, completions, **how)

    with patched(packing, "lay_out", packed):
        yield


FAULT = Fault(
    cause="layout-changes-logp",
    mechanism="packing without a mask between rows",
    inject=inject,
    visible_at_start=True,
)
