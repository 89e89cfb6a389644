"""Isolates a run from failures of its trackers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.trackers.protocol import Tracker

MAX_ERROR_CHARACTERS = 300  # characters of an error: some quote a server's response


class FailSafeTracker:
    """Forwards to a tracker; after its first exception, reports it once and stops forwarding."""

    def __init__(
        self, tracker: Tracker, *, name: str, print_line: Callable[[str], None], events: Journal
    ) -> None:
        self._tracker = tracker
        self._name = name
        self._print_line = print_line
        self._events = events
        self._step = 0
        self._failed = False

    def begin(self, *, step: int) -> None:
        """Start the tracker."""
        self._step = step
        self._call_tracker(lambda: self._tracker.begin(step=step))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the metrics of a step."""
        self._step = step
        self._call_tracker(lambda: self._tracker.log_metrics(step, metrics))

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Forward completions."""
        self._call_tracker(lambda: self._tracker.log_completions(step, rollouts, record))

    def rewind(self, step: int) -> None:
        """Forward a rollback."""
        self._call_tracker(lambda: self._tracker.rewind(step))

    def log_message(self, step: int, message: str) -> None:
        """Forward an event."""
        self._call_tracker(lambda: self._tracker.log_message(step, message))

    def close(self) -> None:
        """Close the tracker unless it failed."""
        self._call_tracker(self._tracker.close)

    def _call_tracker(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # third-party code, networks and disks
            self._failed = True
            self._report_failure(
                f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR_CHARACTERS]
            )

    def _report_failure(self, problem: str) -> None:
        self._print_line(
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
