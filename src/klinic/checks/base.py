"""What a check is, what it may see, and what it says.

A check looks for one cause. It reads a `Case`: the record of a step, those before it, run.json, the
metrics, and what the live learner answered when it was asked. What a check needs and does not find
is named; missing data is never a pass.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from klinic.evidence.facts import fact_from_json, fact_to_json
from klinic.evidence.record import StepRecord
from klinic.evidence.verdict import Verdict


class Stage(IntEnum):
    """The order in which causes are looked for: a later one can be an effect of an earlier one."""

    ALIGNMENT = 1
    """Ids, lengths, masks, numbers that are numbers."""
    SAMPLER = 2
    """Sampler against learner, for the same weights."""
    REFERENCE = 3
    """Which policy the KL is measured to."""
    ADVANTAGE = 4
    """Rewards, groups, advantages."""
    WIRING = 5
    """How terms reach the gradient."""
    DYNAMICS = 6
    """Every part is right, and the policy goes the wrong way."""
    REPORTING = 7
    """The run is well, and what it says of itself is wrong."""


T = TypeVar("T")
Answer = Mapping[str, Any]
"""What the live parts answered to one question of `evidence.fields.PROBES`: plain JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a check may see."""

    record: StepRecord
    earlier: tuple[StepRecord, ...] = ()
    """Records of steps before, the oldest first."""
    start: StepRecord | None = None
    """The record of the first update, if it was kept: policy and reference are one there."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """run.json."""
    metrics: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Lines of metrics.jsonl by step, up to this one."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """What was asked in this step, by question."""
    measured: dict[Any, tuple[StepRecord, Any]] = field(default_factory=dict)
    """What `of` has returned so far."""

    def of(self, measure: Callable[[StepRecord], T], record: StepRecord) -> T:
        """Return a measure of a record: once, however many checks and later steps ask for it."""
        key = measure, id(record)
        if key not in self.measured:
            self.measured[key] = record, measure(record)
        value: T = self.measured[key][1]
        return value

    def missing(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """Return which of the needs are not there."""
        return tuple(need for need in needs if not self._has(need))

    def _has(self, need: str) -> bool:
        place, _, name = need.partition(".")
        match place:
            case "record":
                return getattr(self.record, name) is not None
            case "facts":
                return self.record.facts.get(name) is not None
            case "run":
                return self.run.get(name) is not None
            case "metrics":
                return any(name in line for line in self.metrics.values())
            case "probes":
                return name in self.answers
        raise KeyError(need)

    @property
    def version(self) -> int | None:
        """How many updates the learner had seen; None where that was not recorded."""
        version = self.record.facts.get("learner_version")
        return None if version is None else int(version)

    @property
    def window(self) -> tuple[StepRecord, ...]:
        """The steps before and this one."""
        return (*self.earlier, self.record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found in a step."""

    verdict: Verdict
    summary: str
    """One sentence with the figure and its limit."""
    measured: Mapping[str, float] = field(default_factory=dict)
    never_by: tuple[str, ...] = ()
    """Causes that explain this check, and cannot have left these figures."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values that `from_json` reads back exactly."""
        return {
            "verdict": str(self.verdict),
            "summary": self.summary,
            "measured": {name: fact_to_json(value) for name, value in self.measured.items()},
            "never_by": list(self.never_by),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Finding":
        """Return the finding that `to_json` wrote."""
        measured: dict[str, Any] = {
            name: fact_from_json(value) for name, value in values["measured"].items()
        }
        return cls(
            verdict=Verdict(values["verdict"]),
            summary=values["summary"],
            measured=measured,
            never_by=tuple(values["never_by"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A cause, and the test that tells it from the others."""

    name: str
    stage: Stage
    needs: tuple[str, ...]
    """`record.x`, `facts.x`, `run.x`, `metrics.x` or `probes.x`."""
    fix: str
    judge: Callable[[Case], Finding]
    also: tuple[str, ...] = ()
    """What it looks at where it is there: without it, it can fail and cannot pass."""
    alibi: Callable[[Case], Finding | None] | None = None
    """What can rule the cause out, where something is missing that naming it needs."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """The fix as keys of a recipe, where it is one."""
    explains: tuple[str, ...] = ()
    """Checks that may fail as well where this cause is at work."""

    @property
    def text(self) -> str:
        """What the check looks for and when it is confirmed: the docstring of `judge`."""
        return inspect.getdoc(self.judge) or ""

    def __call__(self, case: Case) -> Finding:
        """Judge a case, or say what is missing."""
        if missing := case.missing(self.needs):
            cleared = None if self.alibi is None else self.alibi(case)
            return cleared or _not_recorded(missing)
        found = self.judge(case)
        if found.verdict is Verdict.PASS and (missing := case.missing(self.also)):
            return _not_recorded(missing)
        return found


def _not_recorded(missing: tuple[str, ...]) -> Finding:
    return no_data(f"not recorded: {', '.join(f'`{need}`' for need in missing)}")


def passed(summary: str, **measured: float) -> Finding:
    """Return a finding that all is well."""
    return Finding(verdict=Verdict.PASS, summary=summary, measured=measured)


def failed(summary: str, **measured: float) -> Finding:
    """Return a finding that the cause is there."""
    return Finding(verdict=Verdict.FAIL, summary=summary, measured=measured)


def warned(summary: str, **measured: float) -> Finding:
    """Return a finding that is worth knowing and names no cause."""
    return Finding(verdict=Verdict.WARN, summary=summary, measured=measured)


def no_data(summary: str) -> Finding:
    """Return a finding that what was recorded does not decide."""
    return Finding(verdict=Verdict.NO_DATA, summary=summary)
