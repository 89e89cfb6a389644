"""The rows of a step as one rank has them: all, of which it computes some, or its own alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from klinic.evidence.merging import ONE_PROCESS, Merge
from klinic.evidence.record import StepRecord, entry_indices
from klinic.learner.packing import MicroBatch, gather_tokens
from klinic.learner.process_group import SINGLE_PROCESS, ProcessGroup
from klinic.learner.row_shares import RowShare


class RankMerge:
    """Merges numbers of the ranks of a learner."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.size = group.size

    def sum(self, values: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
        """Return the sum over all ranks, for each entry."""
        return self._group.all_reduce_sum(torch.from_numpy(values.copy())).numpy()

    def max(self, values: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """Return the largest of all ranks, for each entry."""
        return self._group.all_reduce_max(torch.from_numpy(values.copy())).numpy()


@dataclass(slots=True, kw_only=True)
class StepRows:
    """Some rows of a step, and their division into micro-batches of this rank."""

    record: StepRecord
    batches: list[MicroBatch]
    """Micro-batches of this rank."""
    group: ProcessGroup = SINGLE_PROCESS
    share: RowShare | None = None
    """Set if `record` has the rows of this rank alone; else every rank has all of them."""

    @property
    def merge(self) -> Merge:
        """The ranks whose rows differ."""
        return ONE_PROCESS if self.share is None else RankMerge(self.group)

    def gather_tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a value for every token of the record, from values by micro-batch."""
        group = self.group if self.share is None else SINGLE_PROCESS
        return gather_tokens(parts, self.batches, self.record.num_tokens, group)

    def gather_rows(self, values: Shaped[np.ndarray, "b"]) -> Shaped[np.ndarray, "B"]:
        """Return a value for every row of the step, from those of the record."""
        if self.share is None:
            return values
        whole = np.zeros(self.share.num_step_rows, values.dtype)
        whole[self.share.rows] = values[: len(self.share.rows)]
        return self.merge.sum(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlaces:
    """Where the tokens of some rows are among those of a step."""

    group: Tensor
    """Group of every row of the step."""
    row_offsets: Tensor
    """Of every row of the step."""
    own: Tensor
    """Indices of the tokens that this rank has."""
    num_tokens: int
    """Of the step."""

    def to(self, device: torch.device) -> "TokenPlaces":
        """Return them on a device."""
        tensors = {n: getattr(self, n).to(device) for n in ("group", "row_offsets", "own")}
        return replace(self, **tensors)


def find_places(rows: StepRows) -> TokenPlaces:
    """Return the places of this rank's tokens; ranks exchange the lengths of their rows."""
    assert rows.share is not None  # noqa: S101 - else all tokens are here
    lengths = rows.gather_rows(np.diff(rows.record.row_offsets))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    own, _ = entry_indices(offsets, rows.share.rows)
    group = rows.gather_rows(rows.record.group)
    return TokenPlaces(
        group=torch.from_numpy(group),
        row_offsets=torch.from_numpy(offsets),
        own=torch.from_numpy(own),
        num_tokens=int(offsets[-1]),
    )
