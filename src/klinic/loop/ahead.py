"""Prefetches rollouts in a thread, a bounded number of steps ahead of training.

The thread loads the newest weights into the sampler, samples and scores a batch, and starts the
next one as soon as the bound allows. The learner consumes batches in order. Staleness, in updates,
is bounded and recorded for every completion.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Queue

from klinic.errors import LogitsError
from klinic.loop.clock import Clock
from klinic.loop.gather import gather
from klinic.loop.parts import Parts
from klinic.loop.state import LoopState
from klinic.loop.step import Collected
from klinic.loop.watch import InTroubleError, Watch
from klinic.model.weights import Weights


@dataclass(slots=True, kw_only=True)
class _Batch:
    """One prefetched batch: rollouts, or the error that prevented them."""

    places: list[int] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    collected: Collected | None = None
    error: BaseException | None = None


class Ahead:
    """Samples later batches while the learner trains on earlier ones."""

    def __init__(
        self, parts: Parts, state: LoopState, *, most: int, freeze: Callable[[], None]
    ) -> None:
        """Start after `state`, at most `max_staleness` steps ahead.

        `snapshot_weights` copies the weights into the buffer that the sampler loads from.
        """
        self._parts = parts
        self._freeze = freeze
        self._first = state
        self._may_start = threading.Semaphore(0)
        self._frozen = threading.Lock()
        self._batches: Queue[_Batch] = Queue()
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="klinic-ahead")
        self._most = most

    def __enter__(self) -> "Ahead":
        self._publish()
        self._thread.start()
        self._may_start.release(self._most)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the batch in progress and start no other."""
        self._ends = True
        self._may_start.release()
        if kind is None or issubclass(kind, InTroubleError):  # otherwise the run ends
            self._thread.join()

    def __call__(self, parts: Parts, state: LoopState, watch: Watch, clock: Clock) -> Collected:
        """Return the next batch, waiting for it, and allow the thread to start another."""
        with clock.over("sample"):
            watch.held(parts.learner.sound())
            now = self._publish()
            self._may_start.release()
            batch = self._batches.get()
        clock.seconds["ahead"] = sum(batch.clock.seconds.values())
        watch.drawn += batch.places
        if isinstance(batch.error, LogitsError):
            watch.logits()
        if batch.collected is None:
            raise batch.error or RuntimeError("a batch without completions")
        parts.synced(batch.collected.loaded.answer, state.step + 1)
        return replace(batch.collected, behind=now.version - batch.collected.weights.version)

    def _publish(self) -> Weights:
        """Copy the current weights into the buffer that the sampler loads from."""
        with self._frozen:  # not during a transfer
            self._newest = self._parts.learner.publish()
            self._freeze()
            return self._newest

    def _run(self) -> None:
        step, position = self._first.step + 1, self._first.position
        while step <= self._parts.max_steps:
            self._may_start.acquire()
            if self._ends:
                return
            batch = self._sampled(step, position)
            self._batches.put(batch)
            if batch.error is not None:
                return
            step, position = step + 1, batch.places[-1]

    def _sampled(self, step: int, position: int) -> _Batch:
        batch = _Batch()
        try:
            with self._frozen:
                weights = self._newest
                loaded = self._parts.sampler.load(weights)
            gathered = gather(
                self._parts, step=step, position=position, clock=batch.clock, places=batch.places
            )
            batch.collected = Collected(weights=weights, loaded=loaded, gathered=gathered)
        except BaseException as error:  # re-raised by `__call__`
            batch.error = error
        return batch
