"""All of a run that a report shows, read once and bounded: a long run makes no larger page."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.checks import CHECKS
from klinic.doctor.diagnosis import Diagnosis, diagnose
from klinic.doctor.reading import by_step, merged, read_cases, with_old
from klinic.errors import EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS, METRICS, RECIPE, read_run_facts, read_tokens
from klinic.report.gaps import NUM_STEPS, Lane, kl_by_position, lanes, thinned
from klinic.report.heat import HeatStep, heat_step
from klinic.report.marks import Mark, marks_of

NUM_HEAT = 40  # steps that the heat map can be moved to


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A run, ready to be shown."""

    name: str
    facts: Mapping[str, Any]
    recipe: str
    diagnosis: Diagnosis
    steps: list[dict[str, Any]]
    """The metrics of every step."""
    events: list[dict[str, Any]]
    marks: list[Mark]
    """What happened, as the curves show it."""
    lanes: list[Lane]
    kl_by_position: dict[str, list[float]]
    heat: list[HeatStep]


def read_story(run: Path) -> Story:
    """Return what a report shows of a run."""
    if not store.steps(run):
        raise EvidenceError(
            f"{run} has no records to show. Give the folder of a run; its records are in "
            "`records/step=...` (output.records_every: 1)."
        )
    facts = read_run_facts(run)
    found = diagnose(read_cases(run), CHECKS)
    keep = [] if found.first_step is None else [found.first_step]
    texts = read_tokens(run)
    steps = thinned(store.steps(run), NUM_STEPS, keep)
    records = [with_old(store.read_record(run, step), facts) for step in steps]
    metrics = [merged(lines) for _, lines in sorted(by_step(run / METRICS).items())]
    events = list(Journal(run / EVENTS).entries())
    chosen = set(thinned(steps, NUM_HEAT, keep))
    return Story(
        name=str(run),
        facts=facts,
        recipe=(run / RECIPE).read_text() if (run / RECIPE).is_file() else "",
        diagnosis=found,
        steps=metrics,
        events=events,
        marks=marks_of(run, events, metrics),
        lanes=lanes(records),
        kl_by_position=kl_by_position(records),
        heat=[heat_step(record, texts) for record in records if record.step in chosen],
    )
