"""Timeline events of a run, drawn as marks in its curves; the shape encodes the kind.

Most come from events.jsonl. Learning-rate cuts are spans read from recovery.json. Changes of the KL
coefficient come from the metrics if they are few; a coefficient that changes at every step is a
curve.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from klinic.doctor.recovery import RecoveryPlan
from klinic.errors import EvidenceError
from klinic.evidence.files import read_json
from klinic.evidence.numbers import as_number, as_step
from klinic.evidence.run_facts import ENDED, RECOVERY, STOPPED
from klinic.report.logp_gaps import subsample_steps

MAX_PER_KIND = 40  # marks per kind; more would be illegible
MAX_READ_PER_KIND = 100 * MAX_PER_KIND  # marks per kind kept while reading; even
MAX_CHANGES = 12  # coefficient changes; more are shown as a curve
MAX_CHARS = 300  # characters of a description


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKind:
    """A kind of timeline event."""

    words: str
    shape: str
    """A matplotlib marker name."""
    sign: str
    """The same shape as a character, for the legend."""


KINDS = {
    "skip": EventKind(words="batch left out", shape="X", sign="\u2716"),
    "again": EventKind(words="step run again", shape="o", sign="\u25cf"),
    "back": EventKind(words="rolled back", shape="<", sign="\u25c0"),
    "cut": EventKind(words="learning rate cut", shape="", sign="\u25a8"),
    "stop": EventKind(words="stopped", shape="s", sign="\u25a0"),
    "reference": EventKind(words="reference reset", shape="D", sign="\u25c6"),
    "coefficient": EventKind(words="coefficient changed or held", shape="^", sign="\u25b2"),
    "resumed": EventKind(words="resumed", shape=">", sign="\u25b6"),
    "cause": EventKind(words="cause named", shape="*", sign="\u2605"),
    "other": EventKind(words="warning and others", shape="P", sign="\u271a"),
}
ACTS = {"skip": "skip", "again": "again", "replay": "back", "roll back": "back", "stop": "stop"}
EVENTS = {
    "reference": "reference",
    "kl coefficient held": "coefficient",
    "resumed": "resumed",
    "restarted": "resumed",
    "resumed rollback": "resumed",
    "diagnosis": "cause",
    "discarded": "skip",
    STOPPED: "stop",
    ENDED: "stop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """An event at a step, or over a range of steps."""

    step: int
    kind: str
    description: str
    last: int | None = None
    """The last step of a range."""


def timeline_events(
    run: Path, events: Iterable[Mapping[str, Any]], steps: Iterable[Mapping[str, Any]]
) -> list[TimelineEvent]:
    """Return the timeline events of a run in step order, subsampled per kind."""
    by_kind: dict[str, list[TimelineEvent]] = {kind: [] for kind in KINDS}
    for event in events:
        step = as_step(event.get("step"))
        if step is not None:
            kind = event_kind(event)
            by_kind[kind].append(
                TimelineEvent(step=step, kind=kind, description=_describe_event(event, step))
            )
            if (
                len(by_kind[kind]) > MAX_READ_PER_KIND
            ):  # keeps the last one, since the limit is even
                by_kind[kind] = by_kind[kind][::2]
    by_kind["coefficient"] += coefficient_changes("kl_coef", steps)
    subsampled = [mark for marks in by_kind.values() for mark in _subsample_marks(marks)]
    return sorted([*_learning_rate_cuts(run), *subsampled], key=lambda mark: mark.step)


def event_kind(event: Mapping[str, Any]) -> str:
    """Return the kind of an event.

    >>> event_kind({"event": "trouble", "act": "roll back"}), event_kind({"event": "reference"})
    ('back', 'reference')
    """
    act = event.get("act")
    if isinstance(act, str) and act in ACTS:
        return ACTS[act]
    return EVENTS.get(str(event.get("event")), "other")


def coefficient_changes(name: str, steps: Iterable[Mapping[str, Any]]) -> list[TimelineEvent]:
    """Return the changes of a coefficient; none if it changes too often.

    >>> steps = [{"step": 1, "kl_coef": 0.1}, {"step": 2, "kl_coef": 0.2}]
    >>> [mark.description for mark in coefficient_changes("kl_coef", steps)]
    ['step 2: kl_coef 0.1 -> 0.2']
    """
    measured = [
        (step["step"], value)
        for step in steps
        if (value := as_number(step.get(name))) is not None and math.isfinite(value)
    ]
    marks = [
        TimelineEvent(
            step=step, kind="coefficient", description=f"step {step}: {name} {before:g} -> {now:g}"
        )
        for (_, before), (step, now) in pairwise(measured)
        if now != before
    ]
    return marks if len(marks) <= MAX_CHANGES else []


def _learning_rate_cuts(run: Path) -> list[TimelineEvent]:
    try:
        plan = RecoveryPlan.from_json(read_json(run / RECOVERY))
    except (EvidenceError, KeyError, TypeError, ValueError):
        return []  # no recovery plan, or another trainer's file
    cuts = [
        (as_step(cut.first), as_step(cut.last), as_number(cut.factor))
        for cut in plan.cuts[-MAX_PER_KIND:]
    ]
    return [
        TimelineEvent(
            step=first,
            last=last,
            kind="cut",
            description=f"learning rate x {factor:g}, steps {first} to {last}",
        )
        for first, last, factor in cuts
        if first is not None and last is not None and factor is not None
    ]


def _subsample_marks(marks: list[TimelineEvent]) -> list[TimelineEvent]:
    chosen = subsample_steps(range(len(marks)), MAX_PER_KIND)
    return [marks[index] for index in chosen]


def _describe_event(event: Mapping[str, Any], step: int) -> str:
    says = event.get("says", event.get("problem", ""))
    text = f"step {step}: {event.get('event', '?')}{f': {says}' if says else ''}"[: MAX_CHARS + 1]
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "\u2026"
