"""Reads everything a report shows of a run, bounded so that a long run makes no larger page."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from klinic.doctor.cases import fill_logp_old
from klinic.doctor.diagnosis import Diagnosis
from klinic.doctor.findings_cache import FindingsCache
from klinic.doctor.run_diagnosis import Progress, diagnose_run
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import EVENTS, METRICS, RECIPE, read_run_facts, read_tokens
from klinic.recipe.file import read_text
from klinic.report.curves import MetricCurves
from klinic.report.logp_gaps import (
    NUM_STEPS,
    GapLane,
    KLProfile,
    compute_lanes,
    kl_by_position,
    kl_profile,
    longest_row,
    subsample_steps,
)
from klinic.report.timeline_events import TimelineEvent, timeline_events
from klinic.report.token_heatmap import HeatmapStep, heatmap_step

NUM_HEAT = 40  # steps selectable in the heat map
NUM_EVENTS = 200  # newest events listed on a page


@dataclass(slots=True)
class EventLog:
    """The newest events of a run, and their total number."""

    num: int = 0
    last: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_EVENTS))

    def iter_events(self, path: Path) -> Iterator[Mapping[str, Any]]:
        """Yield every event and keep the newest."""
        for event in Journal(path).entries():
            self.num += 1
            self.last.append(event)
            yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All data that a report shows of one run."""

    name: str
    facts: Mapping[str, Any]
    recipe: str
    diagnosis: Diagnosis
    curves: MetricCurves
    events: "EventLog"
    marks: list[TimelineEvent]
    """Timeline events shown in the curves."""
    lanes: list[GapLane]
    kl_by_position: dict[str, list[float]]
    heat: list[HeatmapStep]


def read_run_report(
    run: Path,
    *,
    cache: FindingsCache | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> RunReport:
    """Read a run and its diagnosis; raise if it has no records."""
    if not store.complete_steps(run):
        raise EvidenceError(
            f"{run} has no records to show. Give a run folder; its records are in "
            "`records/step=...` (output.records_every: 1)."
        )
    facts = read_run_facts(run)
    with np.errstate(all="ignore"):  # records may hold any value
        diagnosis = diagnose_run(run, cache=cache, workers=workers, progress=progress)
    keep = [] if diagnosis.first_step is None else [diagnosis.first_step]
    texts = read_tokens(run)
    steps = subsample_steps(store.complete_steps(run), NUM_STEPS, keep)
    shown = _RecordSequence(run, steps, facts)
    first_pass = _scan_records(shown, set(subsample_steps(steps, NUM_HEAT, keep)), texts)
    curves, events = MetricCurves(Journal(run / METRICS).entries()), EventLog()
    return RunReport(
        name=str(run),
        facts=facts,
        recipe=_recipe_text(run / RECIPE),
        diagnosis=diagnosis,
        curves=curves,
        events=events,
        marks=timeline_events(run, events.iter_events(run / EVENTS), curves.iter_rows("kl_coef")),
        lanes=compute_lanes(shown, first_pass.longest),
        kl_by_position=kl_by_position(first_pass.profiles),
        heat=first_pass.heat,
    )


@dataclass(frozen=True, slots=True)
class _RecordSequence:
    """Selected records of a run, reread on each iteration: a hundred do not fit in memory."""

    run: Path
    steps: Sequence[int]
    facts: Mapping[str, Any]

    def __iter__(self) -> Iterator[StepRecord]:
        for step in self.steps:
            yield fill_logp_old(store.read_record(self.run, step), self.facts)


@dataclass(slots=True)
class _FirstPass:
    """Results of the first pass over the records."""

    longest: int = 0
    profiles: list[KLProfile] = field(default_factory=list)
    heat: list[HeatmapStep] = field(default_factory=list)


def _scan_records(
    records: _RecordSequence, chosen: Set[int], texts: Mapping[int, str]
) -> _FirstPass:
    result = _FirstPass()
    for record in records:
        result.longest = max(result.longest, longest_row(record))
        profile = kl_profile(record)
        if profile is not None:
            result.profiles.append(profile)
        if record.step in chosen:
            result.heat.append(heatmap_step(record, texts))
    return result


def _recipe_text(path: Path) -> str:
    """Return the recipe text, or a comment with the reason it cannot be shown."""
    if not path.exists():
        return ""
    if path.is_symlink():  # it could point to any file of the user, whose text would be shown
        return f"# {path.name} is a symbolic link; its target is not shown."
    try:
        return read_text(path)
    except ConfigError as error:
        return f"# {error}"
