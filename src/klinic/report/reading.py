"""Reads everything a report shows of a run, bounded so that a long run makes no larger page."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from klinic.checks.base import Case
from klinic.doctor.cases import fill_logp_old
from klinic.doctor.diagnosis import Diagnosis, rank_failures
from klinic.doctor.findings_cache import FindingsCache
from klinic.doctor.run_diagnosis import Progress, diagnose_run
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import EVENTS, METRICS, RECIPE, read_run_facts, read_tokens
from klinic.recipe.file import read_text
from klinic.report.cause_rows import find_evidence_row
from klinic.report.curves import MetricCurves
from klinic.report.evidence_picture import EvidencePicture, choose_picture
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
from klinic.report.recorded_proof import RecordedProof, read_proof
from klinic.report.run_header import HeaderRow, run_header
from klinic.report.shown_completion import ShownCompletion, show_completion
from klinic.report.step_measures import StepMeasures
from klinic.report.timeline_events import TimelineEvent, timeline_events
from klinic.report.token_heatmap import HeatmapStep, heatmap_step
from klinic.report.token_table import (
    MAX_PAGE_ROWS,
    MAX_PAGE_TOKENS,
    StepTokens,
    step_tokens,
    used_texts,
)
from klinic.report.verdict_card import VerdictCard, card_of_records

NUM_HEAT = 40  # steps selectable in the heat map
NUM_EVENTS = 200  # newest events listed on a page
MAX_FAILED_STEPS = 8  # first steps of failed checks that a page holds in any case


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
    sentence: str
    """The verdict as one message."""
    header: list[HeaderRow]
    recipe: str
    card: VerdictCard
    picture: EvidencePicture | None
    """The curve that shows the evidence of the first cause."""
    curves: MetricCurves
    events: EventLog
    marks: list[TimelineEvent]
    """Timeline events shown in the curves."""
    diagnosis: Diagnosis | None = None
    """None for a scalar log."""
    proof: RecordedProof | None = None
    lanes: list[GapLane] = field(default_factory=list)
    kl_by_position: dict[str, list[float]] = field(default_factory=dict)
    heat: list[HeatmapStep] = field(default_factory=list)
    tokens: list[StepTokens] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    """Text of every token of `tokens`, by id."""
    shown: dict[str, ShownCompletion] = field(default_factory=dict)
    """By failed check: the completion of its first failed step that shows it, if one does."""

    @property
    def cause_step(self) -> int | None:
        """The step of the completion that shows the first cause; None without one."""
        cause = self.card.causes[0].name if self.card.causes else ""
        return self.shown[cause].step if cause in self.shown else None


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
        texts = read_tokens(run)
        curves, events = MetricCurves(Journal(run / METRICS).entries()), EventLog()
        failed = _failed_checks(diagnosis)
        shown = _RecordSequence(run, _shown_steps(run, failed), facts)
        scan = _scan_records(shown, failed, texts)
    for name, series in scan.measures.series.items():
        curves.add_series(name, series)
    picture = None
    if diagnosis.cause is not None:
        picture = choose_picture(diagnosis.cause, diagnosis.first_step, curves.names)
    return RunReport(
        name=str(run),
        sentence=diagnosis.sentence,
        header=run_header(facts, curves, store.complete_steps(run)),
        recipe=_recipe_text(run / RECIPE),
        diagnosis=diagnosis,
        card=card_of_records(diagnosis),
        picture=picture,
        proof=read_proof(run, diagnosis.cause),
        curves=curves,
        events=events,
        marks=timeline_events(run, events.iter_events(run / EVENTS), curves.iter_rows("kl_coef")),
        lanes=compute_lanes(shown, scan.longest),
        kl_by_position=kl_by_position(scan.profiles),
        heat=scan.heat,
        tokens=scan.tokens,
        texts=used_texts(scan.tokens, texts),
        shown=scan.shown,
    )


def _failed_checks(diagnosis: Diagnosis) -> dict[int, list[str]]:
    """Return the failed checks by the first step in which each failed, named causes first."""
    steps: dict[int, list[str]] = {}
    first_steps = {h.check.name: h.first_step for h in diagnosis.hypotheses}
    for name in rank_failures(diagnosis):
        step = first_steps[name]
        if step is not None and (step in steps or len(steps) < MAX_FAILED_STEPS):
            steps.setdefault(step, []).append(name)
    return steps


def _shown_steps(run: Path, failed: Mapping[int, list[str]]) -> list[int]:
    return subsample_steps(store.complete_steps(run), NUM_STEPS, list(failed))


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
class _Scan:
    """Results of the first pass over the records."""

    longest: int = 0
    profiles: list[KLProfile] = field(default_factory=list)
    heat: list[HeatmapStep] = field(default_factory=list)
    tokens: list[StepTokens] = field(default_factory=list)
    measures: StepMeasures = field(default_factory=StepMeasures)
    shown: dict[str, ShownCompletion] = field(default_factory=dict)


def _scan_records(
    records: _RecordSequence, failed: Mapping[int, list[str]], texts: Mapping[int, str]
) -> _Scan:
    result = _Scan()
    chosen = set(subsample_steps(records.steps, NUM_HEAT, list(failed)))
    limits = {
        "num_tokens": MAX_PAGE_TOKENS // len(chosen),
        "num_rows": MAX_PAGE_ROWS // len(chosen),
    }
    for record in records:
        result.longest = max(result.longest, longest_row(record))
        result.measures.add_record(record)
        profile = kl_profile(record)
        if profile is not None:
            result.profiles.append(profile)
        shown = _show_failures(record, failed.get(record.step, []), records.facts, texts)
        result.shown |= shown
        if record.step in chosen:
            first = [row for one in shown.values() for row in one.rows]
            result.heat.append(heatmap_step(record, texts))
            result.tokens.append(step_tokens(record, texts, first=first, **limits))
    return result


def _show_failures(
    record: StepRecord, names: Sequence[str], facts: Mapping[str, Any], texts: Mapping[int, str]
) -> dict[str, ShownCompletion]:
    """Return the completions that show the failed checks of a step."""
    case = Case(record=record, run=facts)
    rows = {name: find_evidence_row(name, case) for name in names}
    return {
        name: show_completion(record, texts, row) for name, row in rows.items() if row is not None
    }


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
