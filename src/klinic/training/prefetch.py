"""Prefetches rollouts in a thread, a bounded number of steps ahead of training.

The thread loads the newest weights into the sampler, samples and scores a batch, and starts the
next one as soon as the bound allows. The learner consumes batches in order. Staleness, in updates,
is bounded and recorded for every completion.
"""

import threading
from dataclasses import dataclass, field, replace
from queue import Queue

from klinic.errors import LogitsError
from klinic.training.collect import collect_rollouts
from klinic.training.guards import StepAnomalyError, StepGuard
from klinic.training.protocol import TrainingRun
from klinic.training.state import LoopState, PhaseTimer
from klinic.training.step import CollectedRollouts


@dataclass(slots=True, kw_only=True)
class _PrefetchedBatch:
    """One prefetched batch: rollouts, or the error that prevented them."""

    batch_indices: list[int] = field(default_factory=list)
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    collected: CollectedRollouts | None = None
    error: BaseException | None = None


class RolloutPrefetcher:
    """Samples later batches while the learner trains on earlier ones."""

    def __init__(self, run: TrainingRun, state: LoopState, *, max_staleness: int) -> None:
        """Start after `state`, at most `max_staleness` steps ahead."""
        self._training_run = run
        self._start_state = state
        self._batch_permits = threading.Semaphore(0)
        self._batches: Queue[_PrefetchedBatch] = Queue()
        self._is_stopping = False
        self._thread = threading.Thread(
            target=self._prefetch_batches, daemon=True, name="klinic-ahead"
        )
        self._max_staleness = max_staleness

    def __enter__(self) -> "RolloutPrefetcher":
        self._thread.start()
        self._batch_permits.release(self._max_staleness)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the batch in progress and start no other."""
        self._is_stopping = True
        self._batch_permits.release()
        if kind is None or issubclass(kind, StepAnomalyError):  # otherwise the run ends
            self._thread.join()

    def __call__(
        self, run: TrainingRun, state: LoopState, guard: StepGuard, timer: PhaseTimer
    ) -> CollectedRollouts:
        """Return the next batch, waiting for it, and allow the thread to start another."""
        with timer.time_phase("sample"):
            guard.check_state(run.learner.all_finite())
            current_weights = run.learner.publish()
            self._batch_permits.release()
            batch = self._batches.get()
        timer.seconds["ahead"] = sum(batch.timer.seconds.values())
        guard.taken_batches += batch.batch_indices
        if isinstance(batch.error, LogitsError):
            guard.report_logits()
        if batch.collected is None:
            raise batch.error or RuntimeError("a batch without completions")
        run.record_sync(batch.collected.loaded, state.step + 1)
        return replace(
            batch.collected, staleness=current_weights.version - batch.collected.weights.version
        )

    def _prefetch_batches(self) -> None:
        step, batch_index = self._start_state.step + 1, self._start_state.batch_index
        while step <= self._training_run.recipe.loop.max_steps:
            self._batch_permits.acquire()
            if self._is_stopping:
                return
            batch = self._sample_batch(step, batch_index)
            self._batches.put(batch)
            if batch.error is not None:
                return
            step, batch_index = step + 1, batch.batch_indices[-1]

    def _sample_batch(self, step: int, batch_index: int) -> _PrefetchedBatch:
        batch, run = _PrefetchedBatch(), self._training_run
        try:
            with run.sampler_lock:  # an evaluation uses the sampler too
                with run.learner.hold_weights():
                    weights = run.learner.publish()
                    loaded = run.sampler.load(weights)
                rollouts = collect_rollouts(
                    run,
                    step=step,
                    batch_index=batch_index,
                    timer=batch.timer,
                    batch_indices=batch.batch_indices,
                )
            batch.collected = CollectedRollouts(weights=weights, loaded=loaded, batch=rollouts)
        except BaseException as error:  # re-raised by `__call__`
            batch.error = error
        return batch
