"""Cut a step into micro-batches of rows of similar length, each laid out for a forward pass.

Rows are padded to the longest of their micro-batch, so long ones go with long ones: with lengths
that differ as those of completions do, a tenth is padding where it would be two thirds among
neighbours of the step. A micro-batch has at most as many tokens, padding included, as `size` rows
of the longest length: of short rows there are more in one. Packed rows lie end to end in that room,
where a model knows them apart.

Several processes take turns, the longest first, so a step is cut alike by one process and by many.
All run equally many micro-batches: a sharded model gathers its weights from everybody in every
forward pass. Who has none left repeats one that does not count. What they write down is another
matter: there each takes neighbouring rows, to be in the order of the step one after the other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from klinic.evidence.record import StepRecord
from klinic.evidence.rows import places_of
from klinic.learner.team import ALONE, Team
from klinic.model.layout import Layout, lay_end_to_end, lay_out

PASS = 128  # tokens of padding that are cheaper than one more pass through the model


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a step, in the step's order."""

    layout: Layout
    rows: Int[np.ndarray, "r"]
    tokens: Int[Tensor, "n"]
    """The places of their tokens among those of the step."""
    offsets: Int[np.ndarray, "r+1"]
    """Where each row begins and ends among these tokens."""
    counts: bool = True
    """False for one that only keeps this process in step with the others."""


def micro_batches(
    record: StepRecord,
    *,
    size: int,
    pad_id: int,
    device: torch.device,
    packed: bool = False,
    team: Team = ALONE,
) -> list[MicroBatch]:
    """Return the rows of a step that are this process's, in passes of `size` longest rows."""
    assert record.prompt_offsets is not None  # noqa: S101 - a step to learn from has prompts
    lengths = np.diff(record.row_offsets) + np.diff(record.prompt_offsets)
    cuts = _dealt(lengths, size, team, packed=packed)
    return laid_out(record, cuts, pad_id=pad_id, device=device, packed=packed)


def laid_out(
    record: StepRecord,
    cuts: Iterable[tuple[np.ndarray, bool]],
    *,
    pad_id: int,
    device: torch.device,
    packed: bool = False,
) -> list[MicroBatch]:
    """Return a micro-batch for each cut: its rows, and whether it counts."""
    assert record.prompt_ids is not None and record.prompt_offsets is not None  # noqa: S101, PT018
    prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    completions = np.split(record.token_ids, record.row_offsets[1:-1])
    batches = []
    for rows, counts in cuts:
        tokens, offsets = places_of(record.row_offsets, rows)
        pairs = [prompts[row] for row in rows], [completions[row] for row in rows]
        batches.append(
            MicroBatch(
                layout=lay_end_to_end(*pairs, device=device)
                if packed
                else lay_out(*pairs, pad_id=pad_id, device=device),
                rows=rows,
                tokens=torch.from_numpy(tokens).to(device),
                offsets=offsets,
                counts=counts,
            )
        )
    return batches


def joined(
    parts: Sequence[Tensor], batches: Sequence[MicroBatch], num_tokens: int, team: Team = ALONE
) -> Tensor:
    """Return a value for every token of the step, from what each process has of its own."""
    whole = parts[0].new_zeros(num_tokens)
    for part, batch in zip(parts, batches, strict=True):
        if batch.counts:
            whole[batch.tokens] = part
    return whole if team.size == 1 else team.sum(whole)


def _dealt(
    lengths: np.ndarray, size: int, team: Team, *, packed: bool
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the rows of each micro-batch of one process, and whether it counts."""
    size = min(size, -(-len(lengths) // team.size))  # so that there is something for everybody
    room = size * int(lengths.max())
    cuts = list(_longest_first(lengths, room, _filled if packed else _similar))
    own = cuts[team.rank :: team.size]
    yield from ((rows, True) for rows in own)
    yield from ((cuts[0], False) for _ in range(-(-len(cuts) // team.size) - len(own)))


def _longest_first(
    lengths: np.ndarray, room: int, fitting: Callable[[np.ndarray, int], int]
) -> Iterator[np.ndarray]:
    """Yield as many rows together as fit, the longest first, each cut in the order of the step."""
    rows = np.argsort(-lengths, kind="stable")
    while len(rows):
        num = fitting(lengths[rows], room)
        yield np.sort(rows[:num])
        rows = rows[num:]


def _similar(lengths: np.ndarray, room: int) -> int:
    """Return how many of the longest rows have room, padded to the first, with little padding."""
    longest = int(lengths[0])
    padding = np.cumsum(longest - lengths[: max(1, room // longest)])
    return int((padding <= PASS).sum())


def _filled(lengths: np.ndarray, room: int) -> int:
    """Return how many of the longest rows have room end to end."""
    return int((np.cumsum(lengths) <= room).sum())
