"""Reads everything a report shows of a run, bounded so that a long run makes no larger page."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from klinic.doctor.diagnosis import Diagnosis
from klinic.doctor.examining import Progress, diagnose_run
from klinic.doctor.findings_cache import FindingsCache
from klinic.doctor.reading import with_old
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import EVENTS, METRICS, RECIPE, read_run_facts, read_tokens
from klinic.recipe.file import read_text
from klinic.report.curves import Curves
from klinic.report.gaps import (
    NUM_STEPS,
    KLProfile,
    Lane,
    kl_by_position,
    kl_profile,
    lanes,
    longest_row,
    thinned,
)
from klinic.report.heat import HeatStep, heat_step
from klinic.report.marks import Mark, marks_of

NUM_HEAT = 40  # steps selectable in the heat map
NUM_EVENTS = 200  # newest events listed on a page


@dataclass(slots=True)
class EventLog:
    """The newest events of a run, and their total number."""

    num: int = 0
    last: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_EVENTS))

    def read(self, path: Path) -> Iterator[Mapping[str, Any]]:
        """Yield every event and keep the newest."""
        for event in Journal(path).entries():
            self.num += 1
            self.last.append(event)
            yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All data that a report shows of one run."""

    name: str
    facts: Mapping[str, Any]
    recipe: str
    diagnosis: Diagnosis
    curves: Curves
    events: "EventLog"
    marks: list[Mark]
    """Timeline events shown in the curves."""
    lanes: list[Lane]
    kl_by_position: dict[str, list[float]]
    heat: list[HeatStep]


def read_story(
    run: Path,
    *,
    cache: FindingsCache | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> Story:
    """Read a run and its diagnosis; raise if it has no records."""
    if not store.steps(run):
        raise EvidenceError(
            f"{run} has no records to show. Give a run folder; its records are in "
            "`records/step=...` (output.records_every: 1)."
        )
    facts = read_run_facts(run)
    with np.errstate(all="ignore"):  # records may hold any value
        found = diagnose_run(run, cache=cache, workers=workers, progress=progress)
    keep = [] if found.first_step is None else [found.first_step]
    texts = read_tokens(run)
    steps = thinned(store.steps(run), NUM_STEPS, keep)
    shown = _Records(run, steps, facts)
    seen = _look_at(shown, set(thinned(steps, NUM_HEAT, keep)), texts)
    curves, events = Curves(Journal(run / METRICS).entries()), EventLog()
    return Story(
        name=str(run),
        facts=facts,
        recipe=_recipe(run / RECIPE),
        diagnosis=found,
        curves=curves,
        events=events,
        marks=marks_of(run, events.read(run / EVENTS), curves.rows("kl_coef")),
        lanes=lanes(shown, seen.longest),
        kl_by_position=kl_by_position(seen.profiles),
        heat=seen.heat,
    )


@dataclass(frozen=True, slots=True)
class _Records:
    """Selected records of a run, reread on each iteration: a hundred do not fit in memory."""

    run: Path
    steps: Sequence[int]
    facts: Mapping[str, Any]

    def __iter__(self) -> Iterator[StepRecord]:
        for step in self.steps:
            yield with_old(store.read_record(self.run, step), self.facts)


@dataclass(slots=True)
class _Seen:
    """Results of the first pass over the records."""

    longest: int = 0
    profiles: list[KLProfile] = field(default_factory=list)
    heat: list[HeatStep] = field(default_factory=list)


def _look_at(records: _Records, chosen: Set[int], texts: Mapping[int, str]) -> _Seen:
    seen = _Seen()
    for record in records:
        seen.longest = max(seen.longest, longest_row(record))
        profile = kl_profile(record)
        if profile is not None:
            seen.profiles.append(profile)
        if record.step in chosen:
            seen.heat.append(heat_step(record, texts))
    return seen


def _recipe(path: Path) -> str:
    """Return the recipe text, or a comment with the reason it cannot be shown."""
    if not path.exists():
        return ""
    if path.is_symlink():  # it could point to any file of the user, whose text would be shown
        return f"# {path.name} is a symbolic link; its target is not shown."
    try:
        return read_text(path)
    except ConfigError as error:
        return f"# {error}"
