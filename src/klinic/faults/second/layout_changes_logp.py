"""layout-changes-logp: the learner pads on the left without masking the padding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import packing

EVERY = {Severity.MILD: 8, Severity.NORMAL: 1}  # rows; one in so many is padded on the left


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Move rows to the right, after padding that they attend to."""

    def left(
        real: Any, prompts: Sequence[Any], completions: Sequence[Any], *, pad_id: int, device: Any
    ) -> Any:
        layout = real(prompts, completions, pad_id=pad_id, device=device)
        ids, at = layout.input_ids.clone(), layout.predict_at.clone()
        starts = np.cumsum([0, *map(len, completions)])
        for row in range(0, len(prompts), EVERY[severity]):
            padding = ids.shape[1] - len(prompts[row]) - len(completions[row])
            ids[row] = torch.roll(ids[row], padding)
            at[starts[row] : starts[row + 1]] += padding
        return replace(layout, input_ids=ids, predict_at=at)

    with patched(packing, "lay_out", left):
        yield


FAULT = Fault(
    cause="layout-changes-logp",
    mechanism="unmasked padding on the left",
    inject=inject,
    visible_at_start=True,
)
