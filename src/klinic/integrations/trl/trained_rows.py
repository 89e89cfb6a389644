"""Joins the rows of TRL's micro-batches to the rows of the generation, by their token ids.

TRL shuffles rows and splits them into micro-batches; an added column of row numbers passes through
that. A user's own code may move, drop or edit rows without the column, so the ids decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from klinic.evidence.record import EmittedBy
from klinic.evidence.row_join import UNMATCHED, common_prefix, match_rows, row_key
from klinic.integrations.trl.rollouts import GenerationBatch, RewardBatch

ROW_COLUMN = "klinic_row"
"""The column of row numbers in TRL's batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch with its loss and the outputs of its forward pass."""

    inputs: Mapping[str, Any]
    """The inputs of TRL's loss."""
    logp: Tensor
    entropy: Tensor | None
    loss: Tensor
    generation: GenerationBatch
    rewards: RewardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchIds:
    """The ids of a micro-batch on the CPU, and the expected rows of its generation."""

    prompt_ids: np.ndarray
    prompt_mask: np.ndarray
    completion_ids: np.ndarray
    trained_mask: np.ndarray
    expected: np.ndarray
    advantages: np.ndarray | None = None

    def prompt(self, row: int) -> np.ndarray:
        """Return the prompt of a row, without padding."""
        ids: np.ndarray = self.prompt_ids[row][self.prompt_mask[row]]
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """A trained row: its index in the micro-batch and in the generation."""

    batch: MicroBatch
    batch_row: int
    generation_row: int
    length: int
    is_moved: bool
    """Whether its sample was generated at another place than the row's number."""
    num_sampled: int
    """Leading tokens that equal those of the sample: all, unless ids were changed."""

    def slice_tokens(self, name: str, values: Any) -> np.ndarray:
        """Return the row's part of a padded array, one entry per token."""
        part = np.asarray(values[self.batch_row])[: self.length]
        if len(part) < self.length:  # the trained row is shorter than the sampled one
            raise ValueError(f"{name} has {len(part)} tokens of {self.length}")
        return part

    def sampled_values(self, rows: Sequence[np.ndarray], fill: float | int) -> np.ndarray:
        """Return the sample's values of the row's tokens; `fill` for tokens that are not its."""
        values = rows[self.generation_row][: self.num_sampled]
        padded = np.full(self.length, fill, values.dtype)
        padded[: len(values)] = values
        return padded

    @property
    def is_changed(self) -> bool:
        """Whether the row holds ids that no sample has."""
        return self.num_sampled < self.length

    def emitted_by(self) -> np.ndarray | None:
        """Return the source of each token; None if unknown."""
        emitters = self.batch.generation.emitted_by
        return None if emitters is None else self.sampled_values(emitters, EmittedBy.TOOL)


def join_batches(batches: Sequence[MicroBatch], ids: Sequence[BatchIds]) -> list[TrainedRow]:
    """Return the rows of all micro-batches, each with its row of the generation."""
    joined: dict[tuple[int, int], int] = {}
    for generation in {id(batch.generation): batch.generation for batch in batches}.values():
        members = [n for n, batch in enumerate(batches) if batch.generation is generation]
        rewards = batches[members[0]].rewards
        places = [(n, row) for n in members for row in range(len(ids[n].expected))]
        numbers = join_ids([ids[n] for n in members], generation, rewards)
        joined |= dict(zip(places, numbers.tolist(), strict=True))
    return [
        _build_row(batch, ids[n], row, joined[n, row])
        for n, batch in enumerate(batches)
        for row in range(len(ids[n].expected))
    ]


def join_ids(
    parts: Sequence[BatchIds], generation: GenerationBatch, rewards: RewardBatch | None
) -> np.ndarray:
    """Return the generation's row of every row of some batches; UNMATCHED for unknown ids."""
    pad_id = generation.pad_id
    sampled = [
        row_key(prompt, ids, pad_id)
        for prompt, ids in zip(generation.prompt_ids, generation.completion_ids, strict=True)
    ]
    trained = [
        row_key(part.prompt(row), part.completion_ids[row], pad_id)
        for part in parts
        for row in range(len(part.expected))
    ]
    has_order = rewards is not None and all(part.advantages is not None for part in parts)
    return match_rows(
        trained,
        sampled,
        expected=np.concatenate([part.expected for part in parts]).tolist(),
        trained_order=[float(a) for part in parts for a in part.advantages]  # type: ignore[union-attr]
        if has_order
        else None,
        sampled_order=rewards.total.tolist() if has_order and rewards is not None else None,
    )


def _build_row(batch: MicroBatch, ids: BatchIds, row: int, number: int) -> TrainedRow:
    expected = int(ids.expected[row])
    width = ids.completion_ids.shape[1]
    if number != UNMATCHED:
        length = min(len(batch.generation.completion_ids[number]), width)
        num_sampled = length
    else:
        number = expected
        sample = batch.generation.completion_ids[number]
        trained = np.flatnonzero(ids.trained_mask[row])
        length = min(max(len(sample), int(trained[-1]) + 1 if trained.size else 0), width)
        num_sampled = common_prefix(sample, ids.completion_ids[row, :length])
    return TrainedRow(
        batch=batch,
        batch_row=row,
        generation_row=number,
        length=length,
        is_moved=number != expected,
        num_sampled=num_sampled,
    )
