"""Diagnoses a run on disk: reads cached findings of judged segments and judges the others.

A long run is split into segments. The findings of a segment are one small value, and merging the
values of all segments gives bit for bit the result of judging every step in order.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from klinic.checks import CHECKS
from klinic.doctor.diagnosis import Diagnosis, Examination
from klinic.doctor.findings_cache import FindingsCache, judges_version
from klinic.doctor.judge_workers import AHEAD, JudgeWorker, start_workers, usable_cores
from klinic.doctor.reading import read_inputs, recorded_steps
from klinic.doctor.record_index import RecordIndex, Seen
from klinic.doctor.segments import (
    LENGTH,
    Segment,
    cut,
    from_plain,
    group_steps,
    judge,
    keys_of,
    to_plain,
)

MOST_WORKERS = 3  # in addition to this process
PATIENCE = 30.0  # seconds to wait for a worker, longer if segments take longer here
LONG = 3 * LENGTH  # steps to judge from which a worker process pays off

Progress = Callable[[int, int], None]
"""Called with the number of judged steps and the total."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A segment of a run with its cached findings and the steps left to judge."""

    number: int
    seen: dict[int, Seen]
    key: str | None
    """Cache key of the whole segment; None if it cannot be cached."""
    known: Examination | None
    """Findings of its first steps, or of all."""
    left: Segment | None
    """The steps left to judge."""


def diagnose_run(
    run: Path,
    *,
    cache: FindingsCache | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> Diagnosis:
    """Diagnose the records of a run with every check.

    With `workers`, the main script must be importable (`if __name__ == "__main__":`), as for any
    use of multiprocessing.
    """
    jobs = _plan(run, cache)
    _Judging(RecordIndex(run, cache), cache, progress).work(jobs, workers)
    examination = Examination(CHECKS)
    for job in jobs:
        if job.known is not None:
            examination.join(job.known)
    if cache is not None:
        cache.trim()
    return examination.conclude()


def workers_here() -> int:
    """Return the number of worker processes to use on this machine."""
    return min(usable_cores() - 1, MOST_WORKERS)


def _plan(run: Path, cache: FindingsCache | None) -> list[Job]:
    steps = recorded_steps(run)
    inputs = read_inputs(run)
    index = RecordIndex(run, cache)
    seen = {number: index.look(number, group) for number, group in group_steps(steps)}
    every = {step: one for group in seen.values() for step, one in group.items()}
    starts = frozenset(step for step, one in every.items() if one.starts)
    digests = {step: one.digest for step, one in every.items()}
    segments = cut(run, steps, inputs, starts)
    jobs = []
    for (number, group), segment in zip(seen.items(), segments, strict=True):
        job = Job(number=number, seen=group, key=None, known=None, left=segment)
        if cache is not None and all(digests[s] for s in (*segment.before, *segment.steps)):
            keys = keys_of(segment, digests, judges_version())
            last = number == next(reversed(seen))
            _recall(job, keys if last else keys[-1:], cache, index)
        jobs.append(job)
    return jobs


def _recall(job: Job, keys: Sequence[str], cache: FindingsCache, index: RecordIndex) -> None:
    """Load the cached findings of a segment, or of as many of its first steps as possible."""
    segment = job.left
    assert segment is not None  # noqa: S101 - set by `_plan`
    job.key = keys[-1]
    for back, key in enumerate(reversed(keys)):
        known = from_plain(cache.get(key), CHECKS)
        if known is None:
            continue
        num = len(segment.steps) - back
        first = {step: job.seen[step] for step in segment.steps[:num]}
        if index.verify(first):
            job.known = known
            job.left = segment.behind(num) if back else None
            if not back and not all(one.verified for one in first.values()):
                index.keep(job.number, job.seen)
        return


class _Judging:
    """Judges the remaining steps of a run in this process and in workers."""

    def __init__(
        self, index: RecordIndex, cache: FindingsCache | None, progress: Progress | None
    ) -> None:
        self._index, self._cache, self._progress = index, cache, progress
        self._done = self._total = 0
        self._slowest = 0.0

    def work(self, jobs: Sequence[Job], workers: int) -> None:
        """Judge the remaining steps of each segment; raise the error of the earliest segment."""
        waiting = {number: job for number, job in enumerate(jobs) if job.left is not None}
        self._total = sum(len(job.left.steps) for job in waiting.values() if job.left is not None)
        wrong: dict[int, Exception] = {}
        with start_workers(workers if self._total >= LONG else 0) as started:
            while waiting:
                self._share_out(waiting, started)
                elsewhere = {number for worker in started for number in worker.has}
                here = next((number for number in waiting if number not in elsewhere), None)
                if here is None:
                    self._wait(waiting, started)
                    continue
                try:
                    self._judge_here(waiting.pop(here))
                except Exception as error:
                    wrong[here] = error
                    for number in [number for number in waiting if number > here]:
                        del waiting[number]
                for worker in started:
                    self._collect(worker, waiting, patience=0.0)
        if wrong:
            raise wrong[min(wrong)]

    def _share_out(self, waiting: dict[int, Job], workers: list[JudgeWorker]) -> None:
        """Queue segments at every worker."""
        for worker in workers:
            given = {number for each in workers for number in each.has}
            free = [number for number in waiting if number not in given]
            # this process takes the first one
            for number in free[1:][: AHEAD - len(worker.has)] if worker.alive else ():
                segment = waiting[number].left
                if segment is not None:
                    worker.give(number, segment)

    def _wait(self, waiting: dict[int, Job], workers: list[JudgeWorker]) -> None:
        """Wait for a worker's result; kill the busy workers on a timeout."""
        begun = time.monotonic()
        busy = [worker for worker in workers if worker.has]
        while time.monotonic() - begun < max(PATIENCE, 5 * self._slowest):
            if any(self._collect(worker, waiting, patience=0.1) for worker in busy):
                return
            if not all(worker.alive for worker in busy):
                break
        for worker in busy:
            worker.end()

    def _collect(self, worker: JudgeWorker, waiting: dict[int, Job], patience: float) -> bool:
        """Store a worker's result; return whether there was one."""
        answer = worker.take(patience)
        if answer is None:
            return False
        number, plain = answer
        found = None if plain is None else from_plain(plain, CHECKS)
        if found is not None and number in waiting:
            self._settle(waiting.pop(number), found)
        return True

    def _judge_here(self, job: Job) -> None:
        assert job.left is not None  # noqa: S101 - it is pending
        begun = time.monotonic()
        found = judge(job.left, CHECKS)
        self._slowest = max(self._slowest, time.monotonic() - begun)
        self._settle(job, found)

    def _settle(self, job: Job, found: Examination) -> None:
        found.absent  # noqa: B018 - releases the records
        self._done += 0 if job.left is None else len(job.left.steps)
        if job.known is None:
            job.known = found
        else:
            job.known.join(found)
        if job.key is not None and self._cache is not None and self._index.unchanged(job.seen):
            self._cache.put(job.key, to_plain(job.known))
            self._index.keep(job.number, job.seen)
        job.left = None
        if self._progress is not None:
            self._progress(self._done, self._total)
