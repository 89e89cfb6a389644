"""What happened to a run, as marks in its curves: one kind, one shape, so that no colour is needed.

Marks come from events.jsonl; a learning rate that was cut is a band, from recovery.json; changes of
the coefficient come from the metrics, where they are few: one that moves in every step is a curve.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from klinic.doctor.recovery import Plan
from klinic.errors import EvidenceError
from klinic.evidence.files import read_json
from klinic.evidence.run_facts import RECOVERY, STOPPED
from klinic.report.gaps import thinned

MOST = 40  # marks of one kind; more would be a wall
MOST_CHANGES = 12  # of the coefficient; more are a curve
LONGEST = 300  # characters of what is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of mark."""

    words: str
    shape: str
    """As matplotlib names it."""
    sign: str
    """The same as a character, for a legend."""


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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a step, or from a step to another."""

    step: int
    kind: str
    says: str
    last: int | None = None
    """The last step of what lasted."""


def marks_of(
    run: Path, events: Iterable[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[Mark]:
    """Return what happened to a run, in order, and not too much of it."""
    known = [(event, event.get("step")) for event in events]
    marks = [
        Mark(step=step, kind=kind_of(event), says=_says(event, step))
        for event, step in known
        if isinstance(step, int)
    ]
    marks += changes_of("kl_coef", steps)
    kept = [mark for kind in KINDS for mark in _some([m for m in marks if m.kind == kind])]
    return sorted([*_cuts(run), *kept], key=lambda mark: mark.step)


def kind_of(event: Mapping[str, Any]) -> str:
    """Return what an event counts as.

    >>> kind_of({"event": "trouble", "act": "roll back"}), kind_of({"event": "reference"})
    ('back', 'reference')
    """
    act = event.get("act")
    if isinstance(act, str) and act in ACTS:
        return ACTS[act]
    return EVENTS.get(str(event.get("event")), "other")


def changes_of(name: str, steps: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return where a coefficient was changed, unless that is all the time.

    >>> steps = [{"step": 1, "kl_coef": 0.1}, {"step": 2, "kl_coef": 0.2}]
    >>> [mark.says for mark in changes_of("kl_coef", steps)]
    ['step 2: kl_coef 0.1 -> 0.2']
    """
    known = [(s["step"], s[name]) for s in steps if isinstance(s.get(name), int | float)]
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
        return []  # none was made, or it is another trainer's
    return [
        Mark(
            step=cut.first,
            last=cut.last,
            kind="cut",
            says=f"learning rate x {cut.factor:g}, steps {cut.first} to {cut.last}",
        )
        for cut in plan.cuts[-MOST:]
    ]


def _some(marks: list[Mark]) -> list[Mark]:
    chosen = thinned(range(len(marks)), MOST)
    return [marks[place] for place in chosen]


def _says(event: Mapping[str, Any], step: int) -> str:
    says = event.get("says", event.get("problem", ""))
    text = f"step {step}: {event.get('event', '?')}{f': {says}' if says else ''}"
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "\u2026"
