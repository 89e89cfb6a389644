"""The doctor beside a run: when live parts are asked, which causes were named, and what follows."""

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
    """What the doctor of a run says, once for each cause; it may be the end of the run."""

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
        """Whether anybody looks for causes."""
        return self._how != "none"

    def open(self, *, after: int, saved: SavedDoctor | None = None) -> None:
        """Begin to look for causes in the steps after this one, when run.json is there."""
        if not self.examined:
            return
        self._doctor = LiveDoctor(self._folder)
        if after or saved is not None:
            self.begin_again(after, saved)

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Return the state for a checkpoint, with which `begin_again` continues exactly."""
        state = None if self._doctor is None else self._doctor.save(folder)
        return None if state is None else {"named": sorted(self._named), **state}

    def close(self) -> None:
        """Wait for what is still being judged."""
        if self._doctor is not None:
            self._doctor.close()

    def begin_again(self, after: int, saved: SavedDoctor | None) -> None:
        """Go back to an earlier step: to what was saved then, or with nothing named so far."""
        self._named = set() if saved is None else set(saved.state["named"])
        if self._doctor is None:
            return
        if saved is None:  # a checkpoint without a doctor's state
            self._doctor.begin_again(after)
        else:
            self._doctor.restore(saved)

    def asks(self, step: int) -> bool:
        """Whether live parts are asked in a step: now and then, and where something is new."""
        curious = self._doctor is not None and self._doctor.curious
        return self.examined and (asking.is_time(step) or curious)

    def see(
        self, record: StepRecord, metrics: Mapping[str, Any], answers: Mapping[str, Answer]
    ) -> None:
        """Hear what was found in the step before, and hand over one that is done."""
        if self._doctor is not None:
            self.hear(record.step - 1)
            self._doctor.see(record, metrics, answers)

    def tell(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step, such as those of an evaluation."""
        if self._doctor is not None:
            self._doctor.tell(step, metrics)

    def hear(self, step: int) -> None:
        """Tell what was found in a step, if it is new."""
        found = None if self._doctor is None else self._doctor.news()
        if found is not None and found.cause is not None:
            self._name(step, found.cause, found.sentence)

    def hear_sync(self, answer: Mapping[str, Any], step: int, dtype: str) -> None:
        """Name what a sync went wrong by, before anything is sampled or learnt from it."""
        found = after_sync.named(answer, dtype) if self.examined else None
        if found is not None:
            fix = next(check.fix for check in CHECKS if check.name == found.cause)
            self._name(step, found.cause, f"Cause: {found.cause} ({found.summary}). Fix: {fix}")

    def _name(self, step: int, cause: str, sentence: str) -> None:
        """Tell of a cause once, and stop if the recipe says so: no rollback mends one."""
        if cause in self._named:
            return
        self._named.add(cause)
        self._event(step, DIAGNOSIS, sentence, cause=cause)
        if self._how == "stop":
            raise RunStoppedError(f"{self._shown}: {sentence}")
