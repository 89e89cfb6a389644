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

from klinic.doctor.recovery import Plan
from klinic.errors import EvidenceError
from klinic.evidence.files import read_json
from klinic.evidence.numbers import as_number, as_step
from klinic.evidence.run_facts import ENDED, RECOVERY, STOPPED
from klinic.report.gaps import thinned

MOST = 40  # marks per kind; more would be illegible
MOST_READ = 100 * MOST  # marks per kind kept while reading; even
MOST_CHANGES = 12  # coefficient changes; more are shown as a curve
LONGEST = 300  # characters of a description


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of timeline event."""

    words: str
    shape: str
    """A matplotlib marker name."""
    sign: str
    """The same shape as a character, for the legend."""


KINDS = {
    "skip": Kind(words="batch left out", shape="X", sign="\u2716"),
    "again": Kind(words="step run again", shape="o", sign="\u25cf"),
    "back": Kind(words="rolled back", shape="<", sign="\u25c0"),
    "cut": Kind(words="learning rate cut", shape="", sign="\u25a8"),
    "stop": Kind(words="stopped", shape="s", sign="\u25a0"),
    "reference": Kind(words="reference reset", shape="D", sign="\u25c6"),
    "coefficient": Kind(words="coefficient changed or held", shape="^", sign="\u25b2"),
    "resumed": Kind(words="resumed", shape=">", sign="\u25b6"),
    "cause": Kind(words="cause named", shape="*", sign="\u2605"),
    "other": Kind(words="warning and others", shape="P", sign="\u271a"),
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
class Mark:
    """An event at a step, or over a range of steps."""

    step: int
    kind: str
    says: str
    last: int | None = None
    """The last step of a range."""


def marks_of(
    run: Path, events: Iterable[Mapping[str, Any]], steps: Iterable[Mapping[str, Any]]
) -> list[Mark]:
    """Return the timeline events of a run in step order, subsampled per kind."""
    by_kind: dict[str, list[Mark]] = {kind: [] for kind in KINDS}
    for event in events:
        step = as_step(event.get("step"))
        if step is not None:
            kind = kind_of(event)
            by_kind[kind].append(Mark(step=step, kind=kind, says=_says(event, step)))
            if len(by_kind[kind]) > MOST_READ:  # keeps the last one, since the limit is even
                by_kind[kind] = by_kind[kind][::2]
    by_kind["coefficient"] += changes_of("kl_coef", steps)
    kept = [mark for marks in by_kind.values() for mark in _some(marks)]
    return sorted([*_cuts(run), *kept], key=lambda mark: mark.step)


def kind_of(event: Mapping[str, Any]) -> str:
    """Return the kind of an event.

    >>> kind_of({"event": "trouble", "act": "roll back"}), kind_of({"event": "reference"})
    ('back', 'reference')
    """
    act = event.get("act")
    if isinstance(act, str) and act in ACTS:
        return ACTS[act]
    return EVENTS.get(str(event.get("event")), "other")


def changes_of(name: str, steps: Iterable[Mapping[str, Any]]) -> list[Mark]:
    """Return the changes of a coefficient; none if it changes too often.

    >>> steps = [{"step": 1, "kl_coef": 0.1}, {"step": 2, "kl_coef": 0.2}]
    >>> [mark.says for mark in changes_of("kl_coef", steps)]
    ['step 2: kl_coef 0.1 -> 0.2']
    """
    known = [
        (step["step"], value)
        for step in steps
        if (value := as_number(step.get(name))) is not None and math.isfinite(value)
    ]
    marks = [
        Mark(step=step, kind="coefficient", says=f"step {step}: {name} {before:g} -> {now:g}")
        for (_, before), (step, now) in pairwise(known)
        if now != before
    ]
    return marks if len(marks) <= MOST_CHANGES else []


def _cuts(run: Path) -> list[Mark]:
    try:
        plan = Plan.from_json(read_json(run / RECOVERY))
    except (EvidenceError, KeyError, TypeError, ValueError):
        return []  # no recovery plan, or another trainer's file
    cuts = [
        (as_step(cut.first), as_step(cut.last), as_number(cut.factor)) for cut in plan.cuts[-MOST:]
    ]
    return [
        Mark(
            step=first,
            last=last,
            kind="cut",
            says=f"learning rate x {factor:g}, steps {first} to {last}",
        )
        for first, last, factor in cuts
        if first is not None and last is not None and factor is not None
    ]


def _some(marks: list[Mark]) -> list[Mark]:
    chosen = thinned(range(len(marks)), MOST)
    return [marks[place] for place in chosen]


def _says(event: Mapping[str, Any], step: int) -> str:
    says = event.get("says", event.get("problem", ""))
    text = f"step {step}: {event.get('event', '?')}{f': {says}' if says else ''}"[: LONGEST + 1]
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "\u2026"
