"""The log of a run: metrics, events and probe results in its journals, copied to all trackers."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from klinic.doctor.live import DIAGNOSIS_EVENT
from klinic.evidence.dropped_records import DROPPED_EVENT
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS, METRICS, PROBES
from klinic.trackers.protocol import Tracker
from klinic.training.recovery import DECISION_EVENTS
from klinic.training.run_folder import RESTARTED_EVENT, entry_step
from klinic.training.state import CompletedStep, EventFacts

PERSISTENT_EVENTS = DECISION_EVENTS | {RESTARTED_EVENT, DROPPED_EVENT}
"""Events that a rollback keeps: they explain it, or records are gone for good."""


class RunLog:
    """The journals and trackers of a run."""

    def __init__(self, folder: Path, trackers: list[Tracker]) -> None:
        self._folder = folder
        self._trackers = trackers
        self.metrics = Journal(folder / METRICS)
        self.events = Journal(folder / EVENTS)
        self.probes = Journal(folder / PROBES)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, and send them to all trackers."""
        self.metrics.append({"step": step, **metrics})
        for tracker in self._trackers:
            tracker.log_metrics(step, metrics)

    def log_completions(self, completed: CompletedStep) -> None:
        """Send some completions of a step to all trackers."""
        for tracker in self._trackers:
            tracker.log_completions(completed.step, completed.rollouts, completed.all_rows)

    def log_probe(self, step: int, probe: str, result: Mapping[str, float | str | None]) -> None:
        """Write the result of a probe."""
        self.probes.append({"step": step, "probe": probe, **result})

    def record_event(
        self, step: int, name: str, message: str, facts: EventFacts | None = None
    ) -> None:
        """Record an event, and send its message to all trackers."""
        self.events.append({"step": step, "event": name, "says": message, **(facts or {})})
        self.log_message(step, message)

    def log_message(self, step: int, message: str) -> None:
        """Send a message to all trackers."""
        for tracker in self._trackers:
            tracker.log_message(step, message)

    def named_causes(self) -> list[tuple[int, str]]:
        """Return step and name of every diagnosed cause."""
        entries = self.events.entries()
        return [(e["step"], e["cause"]) for e in entries if e["event"] == DIAGNOSIS_EVENT]

    def write_lost_decision(self, decided: Mapping[str, Any] | None) -> None:
        """Write the last recovery decision if a kill prevented that."""
        made = [entry for entry in self.events.entries() if entry["event"] in DECISION_EVENTS]
        if decided is not None and made[-1:] != [decided]:
            self.events.append(dict(decided))

    def discard_attempt(self, step: int) -> None:
        """Discard probes and events of a failed attempt after `step`, as a resumed run would."""
        self.probes.rewind(lambda entry: entry.get("step", 0) <= step)
        persistent = PERSISTENT_EVENTS | {DIAGNOSIS_EVENT}
        self.events.rewind(
            lambda entry: entry.get("step", 0) <= step or entry["event"] in persistent
        )

    def discard_after(self, step: int, causes_at_step: Collection[str] | None) -> None:
        """Discard metrics, probes and events of later steps; recovery decisions stay.

        `causes_at_step` are the causes that the doctor had named in the checkpoint of the step;
        None without one.
        """
        self.metrics.rewind(lambda entry: entry_step(entry, self._folder) <= step)
        self.probes.rewind(lambda entry: entry.get("step", 0) <= step)
        self.events.rewind(lambda entry: _survives_rollback(entry, step, causes_at_step))

    def rewind_trackers(self, step: int) -> None:
        """Roll all trackers back to a step."""
        for tracker in self._trackers:
            tracker.rewind(step)


def _survives_rollback(
    entry: Mapping[str, Any], step: int, causes_at_step: Collection[str] | None
) -> bool:
    """Whether an event survives a rollback to a step."""
    if entry["event"] in PERSISTENT_EVENTS or entry.get("step", 0) < step:
        return True
    if entry["event"] == DIAGNOSIS_EVENT and causes_at_step is not None:
        # the diagnosis of the checkpoint's own step is reported after the save
        return entry.get("step", 0) == step and entry.get("cause") in causes_at_step
    return bool(entry.get("step", 0) <= step)
