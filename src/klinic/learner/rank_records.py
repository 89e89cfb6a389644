"""Each rank writes its rows of a record; a step is complete once all ranks have written."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from klinic.evidence.record import StepRecord
from klinic.evidence.rows import some_rows
from klinic.evidence.store import Part, complete_step, part_name, write_part
from klinic.learner.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    run: Path
    record: StepRecord
    part: Future[Part | None]


class PartWriter:
    """Writes this rank's part of every record in a background thread.

    Rank 0 completes a step when the next one is enqueued: by then all ranks have written theirs.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-records")
        self._pending: _Pending | None = None

    def put(self, run: Path, record: StepRecord) -> None:
        """Complete the previous step, then start writing this one."""
        self.flush()
        part = self._pool.submit(self._write, run, record)
        self._pending = _Pending(run=run, record=record, part=part)

    def flush(self) -> None:
        """Block until every rank has written the last step."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        parts = self._gathered(pending.part.result())
        if self._team.rank == 0:
            complete_step(pending.run, pending.record.step, parts, pending.record.facts)

    def _write(self, run: Path, record: StepRecord) -> Part | None:
        own = range(record.num_rows)[
            own_rows(record.num_rows, rank=self._team.rank, size=self._team.size)
        ]
        return write_part(run, some_rows(record, own), self._team.rank) if own else None

    def _gathered(self, part: Part | None) -> list[Part]:
        """Return the parts of all ranks."""
        told = torch.zeros(self._team.size, 33, dtype=torch.int64)
        if part is not None:
            told[self._team.rank, 0] = part.rows
            digest = np.frombuffer(bytes.fromhex(part.sha256), dtype=np.uint8)
            told[self._team.rank, 1:] = torch.from_numpy(digest.astype(np.int64))
        rows = self._team.sum(told).tolist()
        return [
            Part(file=part_name(rank), rows=row[0], sha256=bytes(row[1:]).hex())
            for rank, row in enumerate(rows)
            if row[0]
        ]


def own_rows(num_rows: int, *, rank: int, size: int) -> slice:
    """Return the rows of a step that one of `size` ranks writes."""
    share = -(-num_rows // size)
    start = min(rank * share, num_rows)
    return slice(start, min(start + share, num_rows))
