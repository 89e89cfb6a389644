"""Connects the live doctor to a run: probe schedule, reported causes, and whether to stop."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from klinic.checks import CHECKS, after_sync
from klinic.checks.base import Answer
from klinic.errors import RunStoppedError
from klinic.evidence.record import StepRecord
from klinic.loop import asking
from klinic.loop.live_doctor import LiveDoctor, SavedDoctor

DIAGNOSIS = "diagnosis"  # the event


class Consulting:
    """Reports each diagnosed cause once, and stops the run if the recipe is set to `stop`."""

    def __init__(
        self,
        folder: Path,
        how: Literal["none", "tell", "stop"],
        event: Callable[..., None],
        *,
        shown: Path,
    ) -> None:
        self._folder = folder
        self._shown = shown
        self._how = how
        self._event = event
        self._doctor: LiveDoctor | None = None
        self._named: set[str] = set()

    @property
    def examined(self) -> bool:
        """Whether the recipe enables the live doctor."""
        return self._how != "none"

    def open(self, *, after: int, saved: SavedDoctor | None = None) -> None:
        """Start checking the steps after `after`; requires run.json."""
        if not self.examined:
            return
        self._doctor = LiveDoctor(self._folder)
        if after or saved is not None:
            self.begin_again(after, saved)

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Return the state for a checkpoint, from which `restart_after` continues exactly."""
        state = None if self._doctor is None else self._doctor.save(folder)
        return None if state is None else {"named": sorted(self._named), **state}

    def close(self) -> None:
        """Wait for pending checks."""
        if self._doctor is not None:
            self._doctor.close()

    def begin_again(self, after: int, saved: SavedDoctor | None) -> None:
        """Roll back to an earlier step: restore the saved state, or clear the reported causes."""
        self._named = set() if saved is None else set(saved.state["named"])
        if self._doctor is None:
            return
        if saved is None:  # the checkpoint has no doctor state
            self._doctor.begin_again(after)
        else:
            self._doctor.restore(saved)

    def asks(self, step: int) -> bool:
        """Whether to run probes in a step: on schedule, or after a check newly failed."""
        curious = self._doctor is not None and self._doctor.curious
        return self.examined and (asking.is_time(step) or curious)

    def see(
        self, record: StepRecord, metrics: Mapping[str, Any], answers: Mapping[str, Answer]
    ) -> None:
        """Report the diagnosis of the previous step, and submit the step just finished."""
        if self._doctor is not None:
            self.hear(record.step - 1)
            self._doctor.see(record, metrics, answers)

    def tell(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step, such as those of an evaluation."""
        if self._doctor is not None:
            self._doctor.tell(step, metrics)

    def hear(self, step: int) -> None:
        """Report the diagnosis of a step if it names a new cause."""
        found = None if self._doctor is None else self._doctor.news()
        if found is not None and found.cause is not None:
            self._name(step, found.cause, found.sentence)

    def hear_sync(self, answer: Mapping[str, Any], step: int, dtype: str) -> None:
        """Report the cause of a faulty weight sync before anything is sampled or trained on it."""
        found = after_sync.named(answer, dtype) if self.examined else None
        if found is not None:
            fix = next(check.fix for check in CHECKS if check.name == found.cause)
            self._name(step, found.cause, f"Cause: {found.cause} ({found.summary}). Fix: {fix}")

    def _name(self, step: int, cause: str, sentence: str) -> None:
        """Report a cause once, and stop the run if set to `stop`: no rollback fixes a cause."""
        if cause in self._named:
            return
        self._named.add(cause)
        self._event(step, DIAGNOSIS, sentence, cause=cause)
        if self._how == "stop":
            raise RunStoppedError(f"{self._shown}: {sentence}")
