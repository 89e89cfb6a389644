"""Isolates a run from failures of its trackers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.loop.trackers.protocol import Tracker

LONGEST = 300  # characters of an error: some quote a server's response


class Guarded:
    """Forwards to a tracker; after its first exception, reports it once and stops forwarding."""

    def __init__(
        self, tracker: Tracker, *, name: str, tell: Callable[[str], None], events: Journal
    ) -> None:
        self._tracker = tracker
        self._name = name
        self._tell = tell
        self._events = events
        self._step = 0
        self._failed = False

    def begin(self, *, step: int) -> None:
        """Start the tracker."""
        self._step = step
        self._ask(lambda: self._tracker.begin(step=step))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the metrics of a step."""
        self._step = step
        self._ask(lambda: self._tracker.metrics(step, metrics))

    def completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Forward completions."""
        self._ask(lambda: self._tracker.completions(step, rollouts, record))

    def rewind(self, step: int) -> None:
        """Forward a rollback."""
        self._ask(lambda: self._tracker.rewind(step))

    def event(self, step: int, sentence: str) -> None:
        """Forward an event."""
        self._ask(lambda: self._tracker.event(step, sentence))

    def close(self) -> None:
        """Close the tracker unless it failed."""
        self._ask(self._tracker.close)

    def _ask(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            act()
        except Exception as error:  # third-party code, networks and disks
            self._failed = True
            self._report(f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST])

    def _report(self, problem: str) -> None:
        self._tell(
            f"{self._name} failed at step {self._step} and receives no further metrics. The run "
            f"continues, and metrics.jsonl has every step. {problem}"
        )
        with suppress(OSError):  # the cause may be a full disk
            self._events.append(
                {
                    "step": self._step,
                    "event": "tracker failed",
                    "tracker": self._name,
                    "problem": problem,
                }
            )
