"""All of a run that a report shows, read once and bounded: a long run makes no larger page."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klinic.doctor.diagnosis import Diagnosis
from klinic.doctor.examining import Progress, diagnose_run
from klinic.doctor.findings_cache import FindingsCache
from klinic.doctor.reading import with_old
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS, METRICS, RECIPE, read_run_facts, read_tokens
from klinic.recipe.file import read_text
from klinic.report.curves import Curves
from klinic.report.gaps import NUM_STEPS, Lane, kl_by_position, lanes, thinned
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
    found = diagnose_run(run, cache=cache, workers=workers, progress=progress)
    keep = [] if found.first_step is None else [found.first_step]
    texts = read_tokens(run)
    steps = thinned(store.steps(run), NUM_STEPS, keep)
    records = [with_old(store.read_record(run, step), facts) for step in steps]
    curves, events = Curves(Journal(run / METRICS).entries()), EventLog()
    chosen = set(thinned(steps, NUM_HEAT, keep))
    return Story(
        name=str(run),
        facts=facts,
        recipe=_recipe(run / RECIPE),
        diagnosis=found,
        curves=curves,
        events=events,
        marks=marks_of(run, events.read(run / EVENTS), curves.rows("kl_coef")),
        lanes=lanes(records),
        kl_by_position=kl_by_position(records),
        heat=[heat_step(record, texts) for record in records if record.step in chosen],
    )


def _recipe(path: Path) -> str:
    """Return the recipe, or why it cannot be shown: a run without one can be read all the same."""
    if not path.exists():
        return ""
    try:
        return read_text(path)
    except ConfigError as error:
        return f"# {error}"
