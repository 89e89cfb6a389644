"""Split a step into micro-batches of rows of similar length, laid out for a forward pass.

Rows are padded to the longest of their micro-batch, so they are sorted by length: for typical
completion lengths a tenth of the tokens is padding, against two thirds in the order of the step. A
micro-batch has at most as many tokens, padding included, as `size` rows of the longest length, so
it holds more rows if they are short. Packed rows are concatenated up to the same limit, where the
model supports it.

Micro-batches are dealt to the ranks in turn, longest first, so the split does not depend on the
number of ranks. All ranks run equally many micro-batches, because a sharded model gathers its
weights from all ranks in every forward pass; a rank with fewer repeats one with zero weight.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from klinic.evidence.record import StepRecord, entry_indices
from klinic.learner.process_group import SINGLE_PROCESS, ProcessGroup
from klinic.model.layout import Layout, pack_rows, pad_rows
from klinic.model.token_filters import KeptTokens

MAX_PADDING = 128  # tokens of padding that cost less than another forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a step, in the step's order."""

    layout: Layout
    rows: Int[np.ndarray, "r"]
    tokens: Int[Tensor, "n"]
    """Indices of their tokens among those of the step."""
    offsets: Int[np.ndarray, "r+1"]
    """Start and end of each row among these tokens."""
    row_ids: Int[Tensor, "r"]
    """`rows` on the device: a copy in the middle of a step would make the host wait."""
    row_offsets: Int[Tensor, "r+1"]
    """`offsets` on the device."""
    is_counted: bool = True
    """False for a filler that only keeps this rank in sync with the others."""

    def with_kept(self, kept: KeptTokens) -> "MicroBatch":
        """Return the micro-batch with the tokens that a truncated sampler keeps."""
        return replace(self, layout=replace(self.layout, kept=kept))


def make_micro_batches(
    record: StepRecord,
    *,
    size: int,
    pad_id: int,
    device: torch.device,
    packed: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
) -> list[MicroBatch]:
    """Return this rank's micro-batches, each no larger than `size` rows of the longest length."""
    row_sets = split_rows(record, size=size, num_ranks=group.size, packed=packed)
    dealt = deal_row_sets(row_sets, rank=group.rank, num_ranks=group.size)
    own = [(rows, True) for rows in dealt.own] + [(row_sets[0], False)] * dealt.num_fillers
    return lay_out_batches(record, own, pad_id=pad_id, device=device, packed=packed)


def lay_out_batches(
    record: StepRecord,
    row_sets: Iterable[tuple[np.ndarray, bool]],
    *,
    pad_id: int,
    device: torch.device,
    packed: bool = False,
) -> list[MicroBatch]:
    """Return a micro-batch for each pair of rows and whether they count."""
    assert record.prompt_ids is not None and record.prompt_offsets is not None  # noqa: S101, PT018
    prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    completions = np.split(record.token_ids, record.row_offsets[1:-1])
    batches = []
    for rows, is_counted in row_sets:
        tokens, offsets = entry_indices(record.row_offsets, rows)
        pairs = [prompts[row] for row in rows], [completions[row] for row in rows]
        batches.append(
            MicroBatch(
                layout=pack_rows(*pairs, device=device)
                if packed
                else pad_rows(*pairs, pad_id=pad_id, device=device),
                rows=rows,
                tokens=torch.from_numpy(tokens).to(device),
                offsets=offsets,
                row_ids=torch.from_numpy(rows).to(device),
                row_offsets=torch.from_numpy(offsets).to(device),
                is_counted=is_counted,
            )
        )
    return batches


def gather_tokens(
    parts: Sequence[Tensor],
    batches: Sequence[MicroBatch],
    num_tokens: int,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Tensor:
    """Return a value for every token of the step, all-reduced from each rank's micro-batches."""
    whole = parts[0].new_zeros(num_tokens)
    for part, batch in zip(parts, batches, strict=True):
        if batch.is_counted:
            whole[batch.tokens] = part
    return whole if group.size == 1 else group.all_reduce_sum(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtRows:
    """The rows of one rank's micro-batches, and the fillers that keep it in sync."""

    own: list[np.ndarray]
    num_fillers: int


def split_rows(
    record: StepRecord, *, size: int, num_ranks: int, packed: bool = False
) -> list[np.ndarray]:
    """Return the rows of every micro-batch of the step, longest first."""
    assert record.prompt_offsets is not None  # noqa: S101 - a step to learn from has prompts
    lengths = np.diff(record.row_offsets) + np.diff(record.prompt_offsets)
    size = min(size, -(-len(lengths) // num_ranks))  # so that every rank has rows
    max_tokens = size * int(lengths.max())
    return list(
        _longest_first(lengths, max_tokens, _num_packed_rows if packed else _num_similar_rows)
    )


def deal_row_sets(row_sets: Sequence[np.ndarray], *, rank: int, num_ranks: int) -> DealtRows:
    """Return every `num_ranks`-th micro-batch, and how many fillers the rank needs."""
    own = list(row_sets[rank::num_ranks])
    return DealtRows(own=own, num_fillers=-(-len(row_sets) // num_ranks) - len(own))


def _longest_first(
    lengths: np.ndarray, max_tokens: int, num_fitting: Callable[[np.ndarray, int], int]
) -> Iterator[np.ndarray]:
    """Yield groups of as many rows as fit, longest first, each in the order of the step."""
    rows = np.argsort(-lengths, kind="stable")
    while len(rows):
        num = num_fitting(lengths[rows], max_tokens)
        yield np.sort(rows[:num])
        rows = rows[num:]


def _num_similar_rows(lengths: np.ndarray, max_tokens: int) -> int:
    """Return how many of the longest rows fit, padded to the first, with little padding."""
    longest = int(lengths[0])
    padding = np.cumsum(longest - lengths[: max(1, max_tokens // longest)])
    return int((padding <= MAX_PADDING).sum())


def _num_packed_rows(lengths: np.ndarray, max_tokens: int) -> int:
    """Return how many of the longest rows fit concatenated."""
    return int((np.cumsum(lengths) <= max_tokens).sum())
