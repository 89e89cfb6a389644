"""Sampling that runs ahead of training, by a bounded number of steps.

A thread lets the sampler take over the newest weights, samples and scores a batch, and goes on to
the next as soon as it may. The learner takes batches in their order. What it trains on is then
some updates old; how many is bounded, and known for every completion.
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
    """What the thread hands over: completions, or why there are none."""

    places: list[int] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    collected: Collected | None = None
    error: BaseException | None = None


class Ahead:
    """Batches that are sampled while the learner is busy with earlier ones."""

    def __init__(
        self, parts: Parts, state: LoopState, *, most: int, freeze: Callable[[], None]
    ) -> None:
        """Begin behind `state`, at most `most` steps ahead.

        `freeze` copies the weights to where the sampler takes them from.
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
        """Let the batch that is under way come to its end, and no other begin."""
        self._ends = True
        self._may_start.release()
        if kind is None or issubclass(kind, InTroubleError):  # else the run is over
            self._thread.join()

    def __call__(self, parts: Parts, state: LoopState, watch: Watch, clock: Clock) -> Collected:
        """Return the next batch, when it is there; the thread may begin another."""
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
        """Copy the weights as they are now to where the sampler takes them from."""
        with self._frozen:  # not while they are being sent
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
        except BaseException as error:  # to be raised where the batch is taken
            batch.error = error
        return batch
