"""All of a run that a report shows, read once and bounded: a long run makes no larger page."""

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

NUM_HEAT = 40  # steps that the heat map can be moved to
NUM_EVENTS = 200  # that a page lists, the last ones


@dataclass(slots=True)
class EventLog:
    """The last events of a run, and how many there are."""

    num: int = 0
    last: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_EVENTS))

    def read(self, path: Path) -> Iterator[Mapping[str, Any]]:
        """Yield every event, and keep the last ones."""
        for event in Journal(path).entries():
            self.num += 1
            self.last.append(event)
            yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A run, ready to be shown."""

    name: str
    facts: Mapping[str, Any]
    recipe: str
    diagnosis: Diagnosis
    curves: Curves
    events: "EventLog"
    marks: list[Mark]
    """What happened, as the curves show it."""
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
    """Return what a report shows of a run; the rest is for `diagnose_run`."""
    if not store.steps(run):
        raise EvidenceError(
            f"{run} has no records to show. Give the folder of a run; its records are in "
            "`records/step=...` (output.records_every: 1)."
        )
    facts = read_run_facts(run)
    with np.errstate(all="ignore"):  # records may hold any number
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
    """Some steps of a run, read anew each time: a hundred of them do not fit in memory."""

    run: Path
    steps: Sequence[int]
    facts: Mapping[str, Any]

    def __iter__(self) -> Iterator[StepRecord]:
        for step in self.steps:
            yield with_old(store.read_record(self.run, step), self.facts)


@dataclass(slots=True)
class _Seen:
    """What the first look at the records gives."""

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
    """Return the recipe, or why it cannot be shown: a run without one can be read all the same."""
    if not path.exists():
        return ""
    if path.is_symlink():  # its text is shown as it is, and could be that of any file of the user
        return f"# {path.name} is a symbolic link, and what it leads to is not shown."
    try:
        return read_text(path)
    except ConfigError as error:
        return f"# {error}"
