"""The batch of the current step on one rank: its rows through scoring, updates and writing.

Every rank makes the same calls; results that need the rows of all ranks are merged.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from klinic.evidence.measures import ClipRange
from klinic.evidence.metrics import updates_metrics
from klinic.evidence.record import Fact, StepRecord, entry_indices
from klinic.learner.fsdp import FsdpLearner
from klinic.learner.protocol import LossScales, PreparedUpdate
from klinic.learner.rank_records import RankRecordWriter
from klinic.learner.row_shares import RowShare
from klinic.learner.scored_batch import ScoredBatch

RESULT_COLUMNS = ("logp", "logp_old", "logp_ref", "logp_teacher", "entropy", "kl_exact", "rank")
"""Columns that the learner adds to a record."""


class RankBatch:
    """The rows of a step that this rank has, and the records of their updates."""

    def __init__(self, learner: FsdpLearner) -> None:
        self._learner = learner
        self._writer = RankRecordWriter(learner.group)
        self._scored: ScoredBatch | None = None
        self._records: list[StepRecord] = []

    @property
    def scored(self) -> ScoredBatch:
        """The batch that was scored last."""
        assert self._scored is not None  # noqa: S101 - rank 0 scores first
        return self._scored

    def score(self, share: RowShare, *, needs_reference: bool) -> ScoredBatch:
        """Score the rows of this rank."""
        self._scored = self._learner.score_share(share, needs_reference=needs_reference)
        self._records = []
        return self._scored

    def prepare(
        self, scales: LossScales, *, num_rows: int
    ) -> tuple[PreparedUpdate, dict[str, np.ndarray]]:
        """Compute the loss and its gradient for the rows of this rank.

        Returns too the results of all ranks for the first `num_rows` rows of the step.
        """
        prepared = self._learner.prepare(self.scored, scales)
        prepared = replace(prepared, number=len(self._records))
        self._records.append(prepared.record)
        return prepared, gather_columns(self.scored, prepared.record, num_rows)

    def update_kl(self) -> float:
        """Return KL(new || old) in nats per token, after the updates of the batch."""
        return self._learner.update_kl(self.scored, self._records[0])

    def measure(
        self, *, first: int, last: int, clip: ClipRange, kl_coef: float
    ) -> dict[str, float]:
        """Return the metrics of the trained tokens of the step; updates are given by number."""
        records = self._records
        return updates_metrics(
            records[first], records[last], clip=clip, kl_coef=kl_coef, merge=self.scored.merge
        )

    def sequence_kl(self) -> np.ndarray | None:
        """Return k1 to the reference summed over each completion of the step."""
        return self._learner.sequence_kl(self.scored)

    def write(self, run: Path, facts: Mapping[str, Fact]) -> None:
        """Write this rank's rows in the background; `facts` matter on rank 0."""
        record, share = self._records[0], self.scored.share
        assert share is not None  # noqa: S101 - scored as a share
        self._writer.start_record(run, replace(record, facts=facts), share.rows)

    def flush(self) -> None:
        """Block until every rank has written the last step."""
        self._writer.flush()


def gather_columns(scored: ScoredBatch, record: StepRecord, num_rows: int) -> dict[str, np.ndarray]:
    """Return the learner's results for the tokens of the first rows of a step, from all ranks."""
    assert scored.share is not None  # noqa: S101 - else all rows are here
    own = np.flatnonzero(scored.share.rows < num_rows)
    lengths = np.zeros(num_rows, np.int64)
    lengths[scored.share.rows[own]] = np.diff(record.row_offsets)[own]
    offsets = np.concatenate([[0], np.cumsum(scored.merge.sum(lengths))])
    here, _ = entry_indices(record.row_offsets, own)
    there, _ = entry_indices(offsets, scored.share.rows[own])
    columns = {}
    for name in RESULT_COLUMNS:
        if (values := getattr(record, name)) is not None:
            columns[name] = np.zeros(offsets[-1], values.dtype)
            columns[name][there] = values[here]
    # a token is of one rank and 0 on the others, so the sum of bytes gathers them
    joined = np.concatenate([column.view(np.uint8) for column in columns.values()])
    whole = scored.group.all_reduce_sum(torch.from_numpy(joined)).numpy()
    parts = np.split(whole, np.cumsum([column.nbytes for column in columns.values()])[:-1])
    return {
        name: part.copy().view(column.dtype)
        for (name, column), part in zip(columns.items(), parts, strict=True)
    }
