"""Each rank writes its rows of a record; a step is complete once all ranks have written.

Rank 0 then merges the parts of all ranks to a few files, in a thread of its own.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from klinic.evidence.part_merging import MAX_FILES, finish_merges, try_merge_parts
from klinic.evidence.record import StepRecord
from klinic.evidence.store import Part, complete_step, part_name, write_part
from klinic.learner.process_group import ProcessGroup

MAX_MERGES = 4  # steps that may wait to be merged before the next one is written


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingPart:
    run: Path
    record: StepRecord
    part: Future[Part | None]


class RankRecordWriter:
    """Writes this rank's part of every record in a background thread.

    Rank 0 completes a step when the next one is enqueued: by then all ranks have written theirs.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-records")
        self._pending: _PendingPart | None = None
        self._merger: ThreadPoolExecutor | None = None
        self._merges: deque[Future[None]] = deque()

    def start_record(self, run: Path, record: StepRecord, rows: np.ndarray) -> None:
        """Complete the previous step, then start writing the rows of this rank.

        `rows` are their indices among those of the step; without any, nothing is written.
        """
        self._complete_pending()
        self._await_merges(at_most=MAX_MERGES)
        if self._merger is None and self._is_merging:
            self._merger = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-merges")
            self._merges.append(self._merger.submit(finish_merges, run, before=record.step))
        part = self._pool.submit(self._write_part, run, record, rows)
        self._pending = _PendingPart(run=run, record=record, part=part)

    def flush(self) -> None:
        """Block until every rank has written the last step, and its parts are merged."""
        self._complete_pending()
        self._await_merges(at_most=0)

    @property
    def _is_merging(self) -> bool:
        return self._group.rank == 0 and self._group.size > MAX_FILES

    def _await_merges(self, *, at_most: int) -> None:
        while len(self._merges) > at_most:
            self._merges.popleft().result()

    def _complete_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        parts = self._gather_parts(pending.part.result())
        if self._group.rank == 0:
            step = pending.record.step
            complete_step(pending.run, step, parts, pending.record.facts)
            if self._merger is not None:
                self._merges.append(self._merger.submit(try_merge_parts, pending.run, step))

    def _write_part(self, run: Path, record: StepRecord, rows: np.ndarray) -> Part | None:
        return write_part(run, record, self._group.rank, rows) if len(rows) else None

    def _gather_parts(self, part: Part | None) -> list[Part]:
        """Return the parts of all ranks."""
        table = torch.zeros(self._group.size, 33, dtype=torch.int64)
        if part is not None:
            table[self._group.rank, 0] = part.rows
            digest = np.frombuffer(bytes.fromhex(part.sha256), dtype=np.uint8)
            table[self._group.rank, 1:] = torch.from_numpy(digest.astype(np.int64))
        rows = self._group.all_reduce_sum(table).tolist()
        return [
            Part(file=part_name(rank), rows=row[0], sha256=bytes(row[1:]).hex())
            for rank, row in enumerate(rows)
            if row[0]
        ]
