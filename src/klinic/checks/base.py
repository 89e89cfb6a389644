"""Checks: the evidence a check reads (`Case`), its result (`Finding`) and its definition (`Check`).

A check looks for one cause. It reads a `Case`: the record of a step, earlier records, run.json, the
metrics, and the results of active probes. A check reports the fields that it needs and that are
missing; missing data is never a pass.
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
    """Order in which causes are tested: a later one can be an effect of an earlier one."""

    ALIGNMENT = 1
    """Ids, lengths, masks, finite values."""
    SAMPLER = 2
    """Sampler against learner at equal weights."""
    REFERENCE = 3
    """The policy that the KL is measured against."""
    ADVANTAGE = 4
    """Rewards, groups, advantages."""
    WIRING = 5
    """How the loss terms reach the gradient."""
    DYNAMICS = 6
    """Every component is correct, and the policy moves in the wrong direction."""
    REPORTING = 7
    """The run is healthy, and its reported metrics are wrong."""


T = TypeVar("T")
ProbeEntry = Mapping[str, Any]
"""An entry of probes.jsonl as it was read: plain JSON values of a probe of `evidence.fields`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The evidence that a check reads."""

    record: StepRecord
    earlier: tuple[StepRecord, ...] = ()
    """Records of earlier steps, oldest first."""
    start: StepRecord | None = None
    """The record of the first update, if available: policy and reference are equal there."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Contents of run.json."""
    metrics: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Lines of metrics.jsonl by step, up to this step."""
    probe_results: Mapping[str, ProbeEntry] = field(default_factory=dict)
    """Results of the active probes of this step, by probe."""
    measure_cache: dict[Any, tuple[StepRecord, Any]] = field(default_factory=dict)
    """Memo of `measure_once`."""

    def measure_once(self, measure: Callable[[StepRecord], T], record: StepRecord) -> T:
        """Return `measure(record)`, computed once for all checks and later steps."""
        key = measure, id(record)
        if key not in self.measure_cache:
            self.measure_cache[key] = record, measure(record)
        value: T = self.measure_cache[key][1]
        return value

    def missing_needs(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """Return the needs that this case does not provide."""
        return tuple(need for need in needs if not self._has_field(need))

    def _has_field(self, need: str) -> bool:
        source, _, name = need.partition(".")
        match source:
            case "record":
                return getattr(self.record, name) is not None
            case "facts":
                return self.record.facts.get(name) is not None
            case "run":
                return self.run.get(name) is not None
            case "metrics":
                return any(name in line for line in self.metrics.values())
            case "probes":
                return name in self.probe_results
        raise KeyError(need)

    @property
    def learner_version(self) -> int | None:
        """Number of updates that the learner had made; None if not recorded."""
        version = self.record.facts.get("learner_version")
        return None if version is None else int(version)

    @property
    def recent_records(self) -> tuple[StepRecord, ...]:
        """The earlier records followed by this one."""
        return (*self.earlier, self.record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check on one step."""

    verdict: Verdict
    summary: str
    """One sentence with the measured value and its limit."""
    measured: Mapping[str, float] = field(default_factory=dict)
    excludes: tuple[str, ...] = ()
    """Causes that explain this check in general, and cannot have produced these values."""

    @property
    def explained(self) -> float:
        """Fraction of the anomaly that the cause alone predicts, if the check measures it; else 0.

        A formula counts, scored at tokens that it was not fitted to, less what another explanation
        of the same values reaches. That an anomaly looks like this cause is no such fraction.
        """
        return min(max(self.measured.get("explained", 0.0), 0.0), 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values that `from_json` reads back exactly."""
        return {
            "verdict": str(self.verdict),
            "summary": self.summary,
            "measured": {name: fact_to_json(value) for name, value in self.measured.items()},
            "never_by": list(self.excludes),
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
            excludes=tuple(values["never_by"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A cause, and the test that distinguishes it from the others."""

    name: str
    description: str
    """The fault in one clause, without a full stop."""
    stage: Stage
    needs: tuple[str, ...]
    """`record.x`, `facts.x`, `run.x`, `metrics.x` or `probes.x`."""
    fix: str
    judge: Callable[[Case], Finding]
    optional_needs: tuple[str, ...] = ()
    """Evidence that is read if present: without it, the check can fail and cannot pass."""
    rule_out: Callable[[Case], Finding | None] | None = None
    """Decides from less evidence, if some of `needs` is missing: rules the cause out, or not."""
    confirm: Callable[[Case], Finding | None] | None = None
    """Confirms the cause from less evidence, if some of `needs` is missing; it never passes."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """The fix as recipe keys, if it is one."""
    explains: tuple[str, ...] = ()
    """Checks that can also fail as an effect of this cause."""
    reads: tuple[str, ...] = ()
    """Further evidence that the check uses, or that separates the cause from similar ones."""
    is_symptom: bool = False
    """Whether faults outside the catalogue often make it fail as well."""
    is_of_setup: bool = False
    """Whether only runs of a certain set-up can have it, which would have recorded `needs`: several
    processes, an entropy bonus, advantages per token."""
    not_recorded: str = ""
    """Evidence that would help and is in no record, and the reason."""

    @property
    def help_text(self) -> str:
        """The text of `klinic explain`: the docstring of `judge`."""
        return inspect.getdoc(self.judge) or ""

    @property
    def deciding_fields(self) -> tuple[str, ...]:
        """Fields without which the check cannot both pass and fail."""
        return self.needs + self.optional_needs

    @property
    def all_fields(self) -> tuple[str, ...]:
        """Every field of the evidence that distinguishes the cause from others."""
        return self.deciding_fields + self.reads

    def __call__(self, case: Case) -> Finding:
        """Judge a case, or report the missing evidence."""
        if missing := case.missing_needs(self.needs):
            ruled_out = None if self.rule_out is None else self.rule_out(case)
            confirmed = None if self.confirm is None or ruled_out else self.confirm(case)
            return ruled_out or confirmed or _missing_needs_finding(missing)
        finding = self.judge(case)
        if finding.verdict is Verdict.PASS and (missing := case.missing_needs(self.optional_needs)):
            return _missing_needs_finding(missing)
        return finding


def _missing_needs_finding(missing: tuple[str, ...]) -> Finding:
    return no_data_finding(f"not recorded: {', '.join(f'`{need}`' for need in missing)}")


def passed_finding(summary: str, **measured: float) -> Finding:
    """Return a finding that rules the cause out."""
    return Finding(verdict=Verdict.PASS, summary=summary, measured=measured)


def failed_finding(summary: str, **measured: float) -> Finding:
    """Return a finding that confirms the cause."""
    return Finding(verdict=Verdict.FAIL, summary=summary, measured=measured)


def warning_finding(summary: str, **measured: float) -> Finding:
    """Return a finding that is worth reporting and confirms no cause."""
    return Finding(verdict=Verdict.WARN, summary=summary, measured=measured)


def no_data_finding(summary: str) -> Finding:
    """Return a finding that the recorded evidence is insufficient."""
    return Finding(verdict=Verdict.NO_DATA, summary=summary)


def count_updates(number: int | None) -> str:
    """Return a number of updates in words.

    >>> count_updates(1), count_updates(2)
    ('1 update', '2 updates')
    """
    return f"{number} update{'' if number == 1 else 's'}"
