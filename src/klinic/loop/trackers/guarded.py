"""A tracker is told about a run; it must not be able to end one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.loop.trackers.protocol import Tracker

LONGEST = 300  # characters of an error: some quote what a server answered


class Guarded:
    """Hands on what it is told until the tracker fails; says so once, and tells it no more."""

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
        """Begin, if it can."""
        self._step = step
        self._ask(lambda: self._tracker.begin(step=step))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the numbers of a step."""
        self._step = step
        self._ask(lambda: self._tracker.metrics(step, metrics))

    def completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Hand on completions."""
        self._ask(lambda: self._tracker.completions(step, rollouts, record))

    def rewind(self, step: int) -> None:
        """Hand on that the run goes back."""
        self._ask(lambda: self._tracker.rewind(step))

    def event(self, step: int, sentence: str) -> None:
        """Hand on what happened."""
        self._ask(lambda: self._tracker.event(step, sentence))

    def close(self) -> None:
        """Close what still works."""
        self._ask(self._tracker.close)

    def _ask(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            act()
        except Exception as error:  # code of others, on networks and disks of others
            self._failed = True
            self._report(f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST])

    def _report(self, problem: str) -> None:
        self._tell(
            f"{self._name} failed at step {self._step} and is told no more. The run goes on, and "
            f"metrics.jsonl has every step. {problem}"
        )
        with suppress(OSError):  # a full disk may be what failed
            self._events.append(
                {
                    "step": self._step,
                    "event": "tracker failed",
                    "tracker": self._name,
                    "problem": problem,
                }
            )
