"""Diagnoses a run on disk: reads cached findings of judged segments and judges the others.

A long run is split into segments. The findings of a segment are one small value, and merging the
values of all segments gives bit for bit the result of judging every step in order.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from klinic.checks import CHECKS
from klinic.doctor.cases import read_facts, read_inputs, recorded_steps
from klinic.doctor.diagnosis import Diagnosis, Examination
from klinic.doctor.findings_cache import FindingsCache, checks_version
from klinic.doctor.judge_workers import (
    MAX_QUEUED_SEGMENTS,
    JudgeWorker,
    start_workers,
    usable_cores,
)
from klinic.doctor.record_index import RecordIndex, StepFileState
from klinic.doctor.segments import (
    LENGTH,
    Segment,
    cache_keys,
    from_json_values,
    group_steps,
    judge_segment,
    split_run,
    to_json_values,
)
from klinic.evidence.dropped_records import read_dropped

MAX_WORKERS = 3  # in addition to this process
PATIENCE = 30.0  # seconds to wait for a worker, longer if segments take longer here
LONG = 3 * LENGTH  # steps to judge from which a worker process pays off

Progress = Callable[[int, int], None]
"""Called with the number of judged steps and the total."""


@dataclass(slots=True, kw_only=True)
class SegmentJob:
    """A segment of a run with its cached findings and the steps left to judge."""

    number: int
    step_files: dict[int, StepFileState]
    key: str | None
    """Cache key of the whole segment; None if it cannot be cached."""
    examination: Examination | None
    """Findings of its first steps, or of all."""
    remaining: Segment | None
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
    jobs = _plan_jobs(run, cache)
    _JobRunner(RecordIndex(run, cache), cache, progress).run_jobs(jobs, workers)
    examination = Examination(CHECKS)
    examination.set_trainer(read_facts(run))
    for job in jobs:
        if job.examination is not None:
            examination.merge_later(job.examination)
    if cache is not None:
        cache.trim()
    recorded = [step for job in jobs for step in job.step_files]
    return replace(examination.conclude(), dropped=read_dropped(run, recorded))


def default_num_workers() -> int:
    """Return the number of worker processes to use on this machine."""
    return min(usable_cores() - 1, MAX_WORKERS)


def _plan_jobs(run: Path, cache: FindingsCache | None) -> list[SegmentJob]:
    steps = recorded_steps(run)
    inputs = read_inputs(run)
    index = RecordIndex(run, cache)
    files_by_segment = {
        number: index.inspect_steps(number, group) for number, group in group_steps(steps)
    }
    every = {step: one for group in files_by_segment.values() for step, one in group.items()}
    starts = frozenset(step for step, one in every.items() if one.starts)
    digests = {step: one.digest for step, one in every.items()}
    segments = split_run(run, steps, inputs, starts)
    jobs = []
    for (number, group), segment in zip(files_by_segment.items(), segments, strict=True):
        job = SegmentJob(
            number=number, step_files=group, key=None, examination=None, remaining=segment
        )
        if cache is not None and all(digests[s] for s in (*segment.before, *segment.steps)):
            keys = cache_keys(segment, digests, checks_version())
            last = number == next(reversed(files_by_segment))
            _load_cached(job, keys if last else keys[-1:], cache, index)
        jobs.append(job)
    return jobs


def _load_cached(
    job: SegmentJob, keys: Sequence[str], cache: FindingsCache, index: RecordIndex
) -> None:
    """Load the cached findings of a segment, or of as many of its first steps as possible."""
    segment = job.remaining
    assert segment is not None  # noqa: S101 - set by `_plan_jobs`
    job.key = keys[-1]
    for back, key in enumerate(reversed(keys)):
        cached = from_json_values(cache.get(key), CHECKS)
        if cached is None:
            continue
        num = len(segment.steps) - back
        first = {step: job.step_files[step] for step in segment.steps[:num]}
        if index.verify(first):
            job.examination = cached
            job.remaining = segment.without_first(num) if back else None
            if not back and not all(one.verified for one in first.values()):
                index.cache_steps(job.number, job.step_files)
        return


class _JobRunner:
    """Judges the remaining steps of a run in this process and in workers."""

    def __init__(
        self, index: RecordIndex, cache: FindingsCache | None, progress: Progress | None
    ) -> None:
        self._index, self._cache, self._progress = index, cache, progress
        self._done = self._total = 0
        self._slowest = 0.0

    def run_jobs(self, jobs: Sequence[SegmentJob], workers: int) -> None:
        """Judge the remaining steps of each segment; raise the error of the earliest segment."""
        waiting = {number: job for number, job in enumerate(jobs) if job.remaining is not None}
        self._total = sum(
            len(job.remaining.steps) for job in waiting.values() if job.remaining is not None
        )
        wrong: dict[int, Exception] = {}
        with start_workers(workers if self._total >= LONG else 0) as started:
            while waiting:
                self._assign_jobs(waiting, started)
                elsewhere = {number for worker in started for number in worker.pending}
                here = next((number for number in waiting if number not in elsewhere), None)
                if here is None:
                    self._wait_for_workers(waiting, started)
                    continue
                try:
                    self._judge_here(waiting.pop(here))
                except Exception as error:
                    wrong[here] = error
                    for number in [number for number in waiting if number > here]:
                        del waiting[number]
                for worker in started:
                    self._collect_result(worker, waiting, patience=0.0)
        if wrong:
            raise wrong[min(wrong)]

    def _assign_jobs(self, waiting: dict[int, SegmentJob], workers: list[JudgeWorker]) -> None:
        """Queue segments at every worker."""
        for worker in workers:
            assigned = {number for each in workers for number in each.pending}
            unassigned = [number for number in waiting if number not in assigned]
            # this process takes the first one
            for number in (
                unassigned[1:][: MAX_QUEUED_SEGMENTS - len(worker.pending)]
                if worker.is_alive
                else ()
            ):
                segment = waiting[number].remaining
                if segment is not None:
                    worker.queue_segment(number, segment)

    def _wait_for_workers(self, waiting: dict[int, SegmentJob], workers: list[JudgeWorker]) -> None:
        """Wait for a worker's result; kill the busy workers on a timeout."""
        begun = time.monotonic()
        busy = [worker for worker in workers if worker.pending]
        while time.monotonic() - begun < max(PATIENCE, 5 * self._slowest):
            if any(self._collect_result(worker, waiting, patience=0.1) for worker in busy):
                return
            if not all(worker.is_alive for worker in busy):
                break
        for worker in busy:
            worker.kill()

    def _collect_result(
        self, worker: JudgeWorker, waiting: dict[int, SegmentJob], patience: float
    ) -> bool:
        """Store a worker's result; return whether there was one."""
        answer = worker.take_result(patience)
        if answer is None:
            return False
        number, plain = answer
        examination = None if plain is None else from_json_values(plain, CHECKS)
        if examination is not None and number in waiting:
            self._finish_job(waiting.pop(number), examination)
        return True

    def _judge_here(self, job: SegmentJob) -> None:
        assert job.remaining is not None  # noqa: S101 - it is pending
        begun = time.monotonic()
        examination = judge_segment(job.remaining, CHECKS)
        self._slowest = max(self._slowest, time.monotonic() - begun)
        self._finish_job(job, examination)

    def _finish_job(self, job: SegmentJob, examination: Examination) -> None:
        examination.missing_fields  # noqa: B018 - releases the records
        self._done += 0 if job.remaining is None else len(job.remaining.steps)
        if job.examination is None:
            job.examination = examination
        else:
            job.examination.merge_later(examination)
        if (
            job.key is not None
            and self._cache is not None
            and self._index.is_unchanged(job.step_files)
        ):
            self._cache.put(job.key, to_json_values(job.examination))
            self._index.cache_steps(job.number, job.step_files)
        job.remaining = None
        if self._progress is not None:
            self._progress(self._done, self._total)
