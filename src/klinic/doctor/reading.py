"""A run on disk as cases: step by step, with a window of steps before, never all at once."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klinic.checks.base import Case
from klinic.errors import EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import METRICS, RUN_FACTS, read_run_facts

WINDOW = 20  # records before a step that a check may look at


def read_cases(run: Path) -> Iterator[Case]:
    """Yield a case for every recorded step, in order."""
    steps = store.steps(run)
    if not steps:
        raise EvidenceError(
            f"{run} has no records, so there is nothing to diagnose. Give the folder of a run; its "
            "records are in `records/step=...` (output.records_every: 1)."
        )
    facts = read_run_facts(run) if (run / RUN_FACTS).exists() else {}
    metrics = _metrics(run)
    earlier: deque[StepRecord] = deque(maxlen=WINDOW)
    for step in steps:
        record = store.read_record(run, step)
        known = {s: line for s, line in metrics.items() if s <= step}
        yield Case(record=record, earlier=tuple(earlier), run=facts, metrics=known)
        earlier.append(record)


def _metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of the metrics by step; an evaluation stands with its step."""
    found: dict[int, dict[str, Any]] = {}
    for entry in Journal(run / METRICS).entries():
        if isinstance(entry.get("step"), int):
            found.setdefault(entry["step"], {}).update(entry)
    return found
