"""Snapshots of a run that another process writes; read-only and incremental.

The run may not have started, or may be rolled back, killed or resumed between two snapshots.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from klinic.doctor.cases import fill_logp_old
from klinic.errors import EvidenceError, KlinicError
from klinic.evidence import store
from klinic.evidence.files import open_file, parse_line, read_json
from klinic.evidence.numbers import as_number, as_step
from klinic.evidence.run_facts import (
    DIAGNOSIS,
    ENDED,
    EVENTS,
    LOCK,
    METRICS,
    RECIPE,
    RUN_FACTS,
    STOPPED,
    read_run_facts,
    read_tokens,
)
from klinic.evidence.tail import JournalTail, JournalUpdate
from klinic.evidence.warm_start_status import WarmStartStatus, read_warm_start
from klinic.recipe.loading import load_recipe
from klinic.recipe.recipe import Recipe
from klinic.report.logp_gaps import LANES, logp_gap
from klinic.report.token_heatmap import HeatmapStep, heatmap_step

NUM_STEPS_KEPT = 400  # steps kept in memory: more than a terminal is wide
NUM_EVENTS_KEPT = 1_000  # newest events kept; a screen shows five
MAX_VERDICT_CHARS = 2_000  # characters
NUM_RECORDS = 60  # recorded steps whose gaps are kept
MAX_RECORDS_PER_POLL = 12  # records read per snapshot, so that the first one of a long run is fast
READ_BACKOFF = 10  # multiple of the last read's duration to wait before records are read again
STEP_TIMES = ("time/sample", "time/reward", "time/learn")


class Phase(StrEnum):
    """State of a run."""

    WAITING = "waiting"
    GOING = "going"
    GONE = "gone"
    PAUSED = "paused"
    STOPPED = "stopped"
    ENDED = "ended"

    @property
    def is_over(self) -> bool:
        """Whether the run will not continue."""
        return self in (Phase.STOPPED, Phase.ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGaps:
    """Mean absolute log-prob gaps of a step by lane, in nats; NaN if unknown."""

    step: int
    sizes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """State of a run at one poll."""

    run: str
    phase: Phase
    steps: tuple[Mapping[str, Any], ...]
    """Metrics of the last steps, in order."""
    max_steps: int | None
    events: tuple[Mapping[str, Any], ...]
    verdict: str | None
    """The last diagnosis, if the doctor named a cause."""
    gaps: tuple[StepGaps, ...]
    heat: HeatmapStep | None
    new_steps: tuple[Mapping[str, Any], ...]
    """Metrics lines since the last poll."""
    new_events: tuple[Mapping[str, Any], ...]
    warm_start: WarmStartStatus | None = None
    """Progress of the warm start, before the first step."""
    back_to: int | None = None
    """The step that the run rolled back to since the last poll."""
    num_damaged: int = 0
    """Metrics lines that are not JSON or lack a step."""
    problem: str = ""
    """Why a file could not be read, if one could not."""
    has_more: bool = False
    """Whether the journals hold more lines than were read in this poll."""

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the last step, from the duration of recent steps."""
        taken = [seconds for step in self.steps[-20:] if (seconds := seconds_of(step))]
        if not taken or self.max_steps is None or self.phase != Phase.GOING:
            return None
        return max(0, self.max_steps - self.step) * sum(taken) / len(taken)


def seconds_of(metrics: Mapping[str, Any]) -> float | None:
    """Return the duration of a step, without evaluations and checkpoints.

    >>> seconds_of({"time/sample": 1.0, "time/reward": 0.5, "time/learn": 2.0}), seconds_of({})
    (3.5, None)
    """
    times = [as_number(metrics.get(name)) for name in STEP_TIMES]
    finite = [seconds for seconds in times if seconds is not None and math.isfinite(seconds)]
    return sum(finite) if finite else None


def tokens_per_second(metrics: Mapping[str, Any]) -> float | None:
    """Return the trained tokens of a step per second."""
    seconds, tokens = seconds_of(metrics), as_number(metrics.get("num_tokens"))
    return tokens / seconds if seconds and tokens is not None else None


class RunWatcher:
    """Polls a run folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tail = JournalTail(run / METRICS)
        self._events_tail = JournalTail(run / EVENTS)
        self._steps: dict[int, dict[str, Any]] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS_KEPT)
        self._damaged = 0
        self._records = RecordReader(run)
        self._recipe: tuple[int, Recipe | None] = (-1, None)
        self._problem = ""
        self._has_more = False

    def take_snapshot(self) -> RunSnapshot:
        """Return the current state of the run."""
        self._problem, self._has_more = "", False
        # first: without a lock, the files read next are final
        is_locked = is_held(self._run / LOCK)
        new, back_to = self._read_metrics()
        new_events = self._read_events()
        if back_to is not None or new or not self._records.gaps:
            with self._record_problems():
                self._records.read_new(again=back_to is not None)
        recipe = self._read_recipe()
        phase = self._find_phase(recipe, is_locked)
        return RunSnapshot(
            run=str(self._run),
            phase=Phase.GOING if self._has_more and phase.is_over else phase,
            steps=tuple(self._steps.values()),
            max_steps=None if recipe is None else recipe.loop.max_steps,
            events=tuple(self._events),
            verdict=self._read_verdict(),
            gaps=tuple(self._records.gaps),
            heat=self._records.heat,
            new_steps=tuple(new),
            new_events=tuple(new_events),
            warm_start=None if self._steps else read_warm_start(self._run),
            back_to=back_to,
            num_damaged=self._damaged,
            problem=self._problem,
            has_more=self._has_more,
        )

    def close(self) -> None:
        """Close the run's files."""
        self._tail.close()
        self._events_tail.close()

    @contextlib.contextmanager
    def _record_problems(self) -> Iterator[None]:
        """Record a read error as the snapshot's problem; the next poll retries."""
        try:
            yield
        except (KlinicError, OSError) as error:
            self._problem = str(error)

    def _read_update(self, tail: JournalTail) -> JournalUpdate:
        update = JournalUpdate(lines=())
        with self._record_problems():
            update = tail.read_update()
        self._has_more = self._has_more or update.has_more
        return update

    def _read_metrics(self) -> tuple[list[dict[str, Any]], int | None]:
        update = self._read_update(self._tail)
        back_to = None
        if update.remaining is not None:
            self._steps, self._damaged = {}, 0
            self._merge_metrics(update.remaining)
            back_to = max(self._steps, default=0)
        return self._merge_metrics(update.lines), back_to

    def _merge_metrics(self, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        """Merge metrics lines by step; an evaluation belongs to its step."""
        entries = [parse_line(line) for line in lines]
        valid = [e for e in entries if e is not None and as_step(e.get("step")) is not None]
        self._damaged += len(entries) - len(valid)
        for entry in valid:
            self._steps[entry["step"]] = {**self._steps.get(entry["step"], {}), **entry}
        for step in sorted(self._steps)[:-NUM_STEPS_KEPT]:
            del self._steps[step]
        return valid

    def _read_events(self) -> list[dict[str, Any]]:
        update = self._read_update(self._events_tail)
        if update.remaining is not None:
            self._events.clear()
            self._events.extend(self._parse_events(update.remaining))
        new = self._parse_events(update.lines)
        self._events.extend(new)
        return new

    def _parse_events(self, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        entries = [parse_line(line) for line in lines]
        valid = [entry for entry in entries if entry is not None]
        if len(valid) < len(entries):
            self._problem = f"{self._run / EVENTS}: {len(entries) - len(valid)} lines are not JSON."
        return valid

    def _read_recipe(self) -> Recipe | None:
        path = self._run / RECIPE
        with contextlib.suppress(KlinicError, OSError):
            changed = path.stat().st_mtime_ns
            if changed != self._recipe[0]:
                self._recipe = (changed, None)  # stays None for another trainer's recipe
                self._recipe = (changed, load_recipe(path).recipe)
        return self._recipe[1]

    def _read_verdict(self) -> str | None:
        diagnoses = [e for e in self._events if e.get("event") == "diagnosis" and e.get("says")]
        if diagnoses:
            return str(diagnoses[-1]["says"])[:MAX_VERDICT_CHARS]
        with contextlib.suppress(KlinicError):
            diagnosis = read_json(self._run / DIAGNOSIS)
            first = diagnosis.get("first_step")
            # the file survives a rollback to before the step it is about
            cause = _first_cause(diagnosis)
            if cause and isinstance(first, int) and first in self._steps:
                return f"{cause}. Fix: {diagnosis.get('fix')}"[:MAX_VERDICT_CHARS]
        return None

    def _find_phase(self, recipe: Recipe | None, is_locked: bool | None) -> Phase:
        if not self._steps and not any((self._run / name).exists() for name in (RECIPE, RUN_FACTS)):
            return Phase.WAITING
        if is_locked:
            return Phase.GOING
        last = max(self._steps, default=0)
        if recipe is not None and last >= recipe.loop.max_steps:
            return Phase.ENDED
        if is_locked is None:  # another trainer without a lock: only its `ended` event counts
            return Phase.ENDED if self._has_ended(last) else Phase.GOING
        if self._events and self._events[-1].get("event") == STOPPED:
            return Phase.PAUSED
        return Phase.STOPPED if self._was_stopped(recipe) else Phase.GONE

    def _has_ended(self, last: int) -> bool:
        """Whether another trainer logged its end and no step followed."""
        event = self._events[-1] if self._events else {}
        step = as_step(event.get("step"))
        return event.get("event") == ENDED and step is not None and last <= step

    def _was_stopped(self, recipe: Recipe | None) -> bool:
        """Whether the run stopped itself, so that a restart would not help."""
        if not self._events:
            return False
        last = self._events[-1]
        by_doctor = recipe is not None and recipe.output.doctor == "stop"
        return last.get("act") == "stop" or (by_doctor and last.get("event") == "diagnosis")


def _first_cause(diagnosis: Mapping[str, Any]) -> str | None:
    """Return the beginning of a verdict: the stated cause of a diagnosis, or its likely one."""
    if diagnosis.get("cause"):
        return f"Cause: {diagnosis['cause']}"
    causes = diagnosis.get("causes")
    first = causes[0] if isinstance(causes, list) and causes else None
    name = first.get("name") if isinstance(first, Mapping) else None
    return f"Most likely cause: {name}" if isinstance(name, str) else None


class RecordReader:
    """Log-prob gaps of the last recorded steps, and the heat map of the newest."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.gaps: list[StepGaps] = []
        self.heat: HeatmapStep | None = None
        self._texts: dict[int, str] | None = None
        self._facts: dict[str, Any] = {}
        self._not_before = 0.0

    def read_new(self, *, again: bool) -> None:
        """Read new records, at a limited rate; `again` rereads all after a rollback."""
        begun = time.monotonic()
        if begun < self._not_before and not again:
            return
        steps = store.complete_steps(self._run)
        available = set(steps)
        self.gaps = [] if again else [one for one in self.gaps if one.step in available]
        if self.heat is not None and (again or self.heat.step not in available):
            self.heat = None
        newest = self.gaps[-1].step if self.gaps else 0
        try:
            for step in [step for step in steps if step > newest][-MAX_RECORDS_PER_POLL:]:
                self._add_record(step)
        finally:
            self._not_before = time.monotonic() + READ_BACKOFF * (time.monotonic() - begun)

    def _add_record(self, step: int) -> None:
        if self._texts is None:
            self._facts = read_run_facts(self._run)
            self._texts = read_tokens(self._run)
        record = fill_logp_old(store.read_record(self._run, step), self._facts)
        sizes = {lane: _mean_size(logp_gap(record, lane)) for lane in LANES}
        self.gaps = [*self.gaps, StepGaps(step=step, sizes=sizes)][-NUM_RECORDS:]
        self.heat = heatmap_step(record, self._texts)


def _mean_size(gaps: np.ndarray | None) -> float:
    finite = np.array([]) if gaps is None else np.abs(gaps[np.isfinite(gaps)])
    return float(finite.mean()) if finite.size else math.nan


def is_held(lock: Path) -> bool | None:
    """Whether a process trains in the folder of this lock; None if unknown."""
    try:
        import fcntl

        file = open_file(lock)
    except (ImportError, EvidenceError):
        return None
    with file:
        try:
            # held for an instant: a run that starts now retries
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False
