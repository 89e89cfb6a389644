"""Cut a step into micro-batches of rows, each laid out for a forward pass."""

from dataclasses import dataclass

import numpy as np
import torch

from klinic.evidence.record import StepRecord
from klinic.model.layout import Layout, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some neighbouring rows of a step."""

    layout: Layout
    rows: slice
    tokens: slice


def micro_batches(
    record: StepRecord, *, size: int, pad_id: int, device: torch.device
) -> list[MicroBatch]:
    """Return the rows of a step, `size` at a time."""
    assert record.prompt_ids is not None and record.prompt_offsets is not None  # noqa: S101, PT018
    prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    completions = np.split(record.token_ids, record.row_offsets[1:-1])
    cuts = []
    for start in range(0, record.num_rows, size):
        rows = slice(start, min(start + size, record.num_rows))
        cuts.append(
            MicroBatch(
                layout=lay_out(prompts[rows], completions[rows], pad_id=pad_id, device=device),
                rows=rows,
                tokens=slice(
                    int(record.row_offsets[rows.start]), int(record.row_offsets[rows.stop])
                ),
            )
        )
    return cuts
