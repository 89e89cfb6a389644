"""layout-changes-logp: rows are packed in pairs, and the second attends to the first.

Second mechanism: the learner pads on the left without masking the padding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import packing

# rows; one in so many is packed after its neighbour
PACKED_ROW_EVERY = {
    Severity.MILD: 8,
    Severity.NORMAL: 2,
}


@contextmanager
def pack_without_mask(severity: Severity) -> Iterator[None]:
    """Prepend the previous row to a row's prompt."""

    def lay_out_packed(
        real: Any, prompts: Sequence[Any], completions: Sequence[Any], **options: Any
    ) -> Any:
        packed_prompts = [
            np.concatenate([prompts[i - 1], completions[i - 1], prompt])
            if i % PACKED_ROW_EVERY[severity] == PACKED_ROW_EVERY[severity] - 1
            else prompt
            for i, prompt in enumerate(prompts)
        ]
        return real(packed_prompts, completions, **options)

    with patch_attribute(packing, "pad_rows", lay_out_packed):
        yield


FAULT = Fault(
    cause="layout-changes-logp",
    mechanism="packing without a mask between rows",
    inject=pack_without_mask,
    visible_at_start=True,
)


# rows; one in so many is padded on the left
LEFT_PADDED_EVERY = {
    Severity.MILD: 8,
    Severity.NORMAL: 1,
}


@contextmanager
def pad_left_unmasked(severity: Severity) -> Iterator[None]:
    """Move rows to the right, after padding that they attend to."""

    def lay_out_left(
        real: Any, prompts: Sequence[Any], completions: Sequence[Any], *, pad_id: int, device: Any
    ) -> Any:
        layout = real(prompts, completions, pad_id=pad_id, device=device)
        ids, at = layout.input_ids.clone(), layout.predict_at.clone()
        starts = np.cumsum([0, *map(len, completions)])
        for row in range(0, len(prompts), LEFT_PADDED_EVERY[severity]):
            padding = ids.shape[1] - len(prompts[row]) - len(completions[row])
            ids[row] = torch.roll(ids[row], padding)
            at[starts[row] : starts[row + 1]] += padding
        return replace(layout, input_ids=ids, predict_at=at)

    with patch_attribute(packing, "pad_rows", lay_out_left):
        yield


SECOND_FAULT = Fault(
    cause="layout-changes-logp",
    mechanism="unmasked padding on the left",
    inject=pad_left_unmasked,
    visible_at_start=True,
)
