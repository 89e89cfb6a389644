"""Cut a step into micro-batches of rows, each laid out for a forward pass.

Several processes take neighbouring micro-batches each, in the order of their ranks, so that what
they write down one after the other is in the order of the step. All run equally many: a sharded
model gathers its weights from everybody in every forward pass. Who has none left repeats one that
does not count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.record import StepRecord
from klinic.learner.team import ALONE, Team
from klinic.model.layout import Layout, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some neighbouring rows of a step."""

    layout: Layout
    rows: slice
    tokens: slice
    counts: bool = True
    """False for one that only keeps this process in step with the others."""


def micro_batches(
    record: StepRecord, *, size: int, pad_id: int, device: torch.device, team: Team = ALONE
) -> list[MicroBatch]:
    """Return the rows of a step that are this process's, at most `size` at a time."""
    assert record.prompt_ids is not None and record.prompt_offsets is not None  # noqa: S101, PT018
    prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    completions = np.split(record.token_ids, record.row_offsets[1:-1])
    cuts = []
    for rows, counts in _dealt(record.num_rows, size, team):
        cuts.append(
            MicroBatch(
                layout=lay_out(prompts[rows], completions[rows], pad_id=pad_id, device=device),
                rows=rows,
                tokens=slice(
                    int(record.row_offsets[rows.start]), int(record.row_offsets[rows.stop])
                ),
                counts=counts,
            )
        )
    return cuts


def own_rows(num_rows: int, *, size: int, team: Team) -> slice:
    """Return the rows of a step that are this process's."""
    own = [rows for rows, counts in _dealt(num_rows, size, team) if counts]
    return slice(own[0].start, own[-1].stop) if own else slice(num_rows, num_rows)


def joined(
    parts: Sequence[Tensor], batches: Sequence[MicroBatch], num_tokens: int, team: Team = ALONE
) -> Tensor:
    """Return a value for every token of the step, from what each process has of its own."""
    if team.size == 1:
        return torch.cat(list(parts))
    whole = parts[0].new_zeros(num_tokens)
    for part, batch in zip(parts, batches, strict=True):
        if batch.counts:
            whole[batch.tokens] = part
    return team.sum(whole)


def _dealt(num_rows: int, size: int, team: Team) -> Iterator[tuple[slice, bool]]:
    """Yield the cuts of one process, and whether each counts."""
    size = min(size, -(-num_rows // team.size))  # so that there is something for everybody
    cuts = [slice(row, min(row + size, num_rows)) for row in range(0, num_rows, size)]
    share = -(-len(cuts) // team.size)
    own = cuts[team.rank * share : (team.rank + 1) * share]
    yield from ((rows, True) for rows in own)
    yield from ((cuts[0], False) for _ in range(share - len(own)))
