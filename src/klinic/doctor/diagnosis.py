"""Turns findings into a cause: triage, ranking and abstaining.

Every check is a hypothesis over all judged steps:

    confirmed   it failed in at least one step, and no other confirmed cause explains it
    explained   it failed, and a confirmed cause explains it
    ruled out   it passed in every step that it could judge
    undecided   its evidence was not recorded, or it warned and never failed

The diagnosis names the confirmed cause of the earliest stage, if every check that could explain it
is decided. If one is undecided, the failure may be an effect of an unrecorded cause: the diagnosis
then names none and lists the fields that would decide.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from klinic.checks.base import Case, Check, Finding, no_data_finding
from klinic.evidence.verdict import Verdict

VERDICT_WEIGHTS = {Verdict.NO_DATA: 0, Verdict.PASS: 1, Verdict.WARN: 2, Verdict.FAIL: 3}
"""Of two findings the one with the higher weight is reported."""


class Status(StrEnum):
    """The state of a hypothesis."""

    CONFIRMED = "confirmed"
    EXPLAINED = "explained"
    RULED_OUT = "ruled out"
    UNDECIDED = "undecided"

    @property
    def mark(self) -> str:
        """One-character symbol for lists."""
        return {"confirmed": "✗", "explained": "-", "ruled out": "✓", "undecided": "?"}[self]


@dataclass(slots=True, kw_only=True)
class Hypothesis:
    """The findings of one check over the steps of a run."""

    check: Check
    num_judged: int = 0
    num_warned: int = 0
    num_failed: int = 0
    first_step: int | None = None
    """The first step in which it failed."""
    finding: Finding | None = None
    """The finding of that step, else the last of those with the highest weight."""
    status: Status = Status.UNDECIDED

    def add_finding(self, step: int, finding: Finding) -> None:
        """Add the finding of a step."""
        if finding.verdict is not Verdict.NO_DATA:
            self.num_judged += 1
        failed = finding.verdict is Verdict.FAIL
        if failed and self.first_step is None:
            self.first_step = step
            self.finding = finding
        self.num_warned += finding.verdict is Verdict.WARN
        self.num_failed += failed
        if self.first_step is None and (
            self.finding is None or _is_stronger(finding, self.finding)
        ):
            self.finding = finding

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, for `restore`."""
        finding = self.finding
        return {
            "judged": self.num_judged,
            "warned": self.num_warned,
            "failed": self.num_failed,
            "first_step": self.first_step,
            "status": str(self.status),
            "finding": None if finding is None else finding.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.num_judged, self.num_warned = state["judged"], state["warned"]
        self.num_failed, self.first_step = state["failed"], state["first_step"]
        self.status = Status(state["status"])
        finding = state["finding"]
        self.finding = None if finding is None else Finding.from_json(finding)

    def merge_later(self, later: "Hypothesis") -> None:
        """Add the findings of the same check in later steps."""
        self.num_judged += later.num_judged
        self.num_warned += later.num_warned
        self.num_failed += later.num_failed
        if self.first_step is not None or later.finding is None:
            return
        fails = later.first_step is not None
        if fails or self.finding is None or _is_stronger(later.finding, self.finding):
            self.finding, self.first_step = later.finding, later.first_step

    def to_json(self) -> dict[str, Any]:
        """Return the hypothesis as JSON values."""
        finding = self.finding
        return {
            "name": self.check.name,
            "status": str(self.status),
            "verdict": None if finding is None else str(finding.verdict),
            "summary": "" if finding is None else finding.summary,
            "measured": {} if finding is None else dict(finding.measured),
            "first_step": self.first_step,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a run: a cause, or none, with the evidence."""

    cause: str | None
    confidence: float
    """Fraction of decided hypotheses, of those that could explain the cause, or of all if no cause
    is named."""
    hypotheses: tuple[Hypothesis, ...]
    missing: tuple[str, ...]
    """Unrecorded fields without which a cause cannot be named or excluded."""
    fix: str | None = None
    change: Mapping[str, Any] = field(default_factory=dict)
    """The fix as recipe keys and values."""
    first_step: int | None = None

    @property
    def no_cause_message(self) -> str:
        """The message if no cause is named: none was found, or the evidence cannot decide."""
        failed = ", ".join(h.check.name for h in self.with_status(Status.CONFIRMED))
        if failed:
            return (
                f"No cause can be named. Failed: {failed}; the evidence for other explanations was "
                "not recorded."
            )
        return "No cause can be named." if self.missing else "No cause was found."

    @property
    def sick(self) -> bool:
        """Whether a check failed, even if the cause cannot be named."""
        return bool(self.with_status(Status.CONFIRMED))

    @property
    def sentence(self) -> str:
        """The cause with its evidence and its fix, as one message."""
        named = next((h for h in self.hypotheses if h.check.name == self.cause), None)
        if named is None or named.finding is None:
            return self.no_cause_message
        return f"Cause: {self.cause} ({named.finding.summary}). Fix: {self.fix}"

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as in `--json` and diagnosis.json."""
        return {
            "cause": self.cause,
            "confidence": self.confidence,
            "findings": [h.to_json() for h in self.hypotheses],
            "ruled_out": [h.check.name for h in self.with_status(Status.RULED_OUT)],
            "missing": list(self.missing),
            "fix": self.fix,
            "change": dict(self.change),
            "first_step": self.first_step,
        }

    def with_status(self, status: Status) -> list[Hypothesis]:
        """Return the hypotheses with a status."""
        return [h for h in self.hypotheses if h.status is status]


class Examination:
    """All hypotheses of a run, updated case by case; `conclude` may be called at any time."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.hypotheses = [Hypothesis(check=check) for check in checks]
        self._last_case: Case | None = None
        self._missing_fields: frozenset[str] | None = None

    def add_case(self, case: Case) -> None:
        """Run every check on a case."""
        self._last_case = case
        for hypothesis in self.hypotheses:
            hypothesis.add_finding(case.record.step, run_check(hypothesis.check, case))

    def state(self) -> dict[str, Any]:
        """Return the state of every hypothesis by check name, for `restore`."""
        return {h.check.name: h.state() for h in self.hypotheses}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; a check that is not in it keeps its initial state."""
        for hypothesis in self.hypotheses:
            if hypothesis.check.name in state:
                hypothesis.restore(state[hypothesis.check.name])

    def merge_later(self, later: "Examination") -> None:
        """Add an examination of later steps by the same checks."""
        for mine, other in zip(self.hypotheses, later.hypotheses, strict=True):
            mine.merge_later(other)
        self._last_case, self._missing_fields = later._last_case, later._missing_fields

    @property
    def missing_fields(self) -> frozenset[str]:
        """Fields that the checks use and the last case does not have."""
        if (last := self._last_case) is not None:
            needs = dict.fromkeys(need for h in self.hypotheses for need in h.check.deciding_fields)
            self.missing_fields = frozenset(last.missing_needs(tuple(needs)))
        return self._missing_fields or frozenset()

    @missing_fields.setter
    def missing_fields(self, needs: frozenset[str]) -> None:
        self._last_case, self._missing_fields = None, needs

    @property
    def failed_checks(self) -> set[str]:
        """Names of the checks that failed in some step."""
        return {h.check.name for h in self.hypotheses if h.num_failed}

    def conclude(self) -> Diagnosis:
        """Return the diagnosis of all cases so far."""
        _assign_statuses(self.hypotheses)
        return _build_diagnosis(self.hypotheses, self.missing_fields)


def diagnose(cases: Iterable[Case], checks: Sequence[Check]) -> Diagnosis:
    """Run every check on every case and return the diagnosis."""
    examination = Examination(checks)
    for case in cases:
        examination.add_case(case)
    return examination.conclude()


def run_check(check: Check, case: Case) -> Finding:
    """Return the finding of a check; an exception becomes a no-data finding with its message."""
    try:
        return check(case)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return no_data_finding(f"the check failed: {message}")


def _assign_statuses(hypotheses: Sequence[Hypothesis]) -> None:
    confirmed = [h for h in hypotheses if h.num_failed]
    for hypothesis in hypotheses:
        if hypothesis.num_failed:
            by_another = any(_could_explain(other, hypothesis) for other in confirmed)
            hypothesis.status = Status.EXPLAINED if by_another else Status.CONFIRMED
        elif hypothesis.num_judged and not hypothesis.num_warned:
            hypothesis.status = Status.RULED_OUT


def _build_diagnosis(hypotheses: Sequence[Hypothesis], absent: frozenset[str]) -> Diagnosis:
    first = min(
        (h for h in hypotheses if h.status is Status.CONFIRMED), key=_rank_key, default=None
    )
    rest = [h for h in hypotheses if h is not first]
    alternatives = rest if first is None else [h for h in rest if _could_explain(h, first)]
    undecided = [h for h in alternatives if h.status is Status.UNDECIDED]
    # a check that warned had its evidence in the steps that it judged
    missing = _missing_evidence([h for h in undecided if not h.num_judged], absent)
    decided = 1 - len(undecided) / max(len(alternatives), 1)
    if first is None or missing:
        return Diagnosis(
            cause=None,
            confidence=decided if first is None else 0.0,
            hypotheses=tuple(hypotheses),
            missing=missing,
        )
    return Diagnosis(
        cause=first.check.name,
        confidence=decided,
        hypotheses=tuple(hypotheses),
        missing=missing,
        fix=first.check.fix,
        change=first.check.change,
        first_step=first.first_step,
    )


def rank_failures(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the failed hypotheses: causes, the likeliest first, then effects."""
    failed = [h for h in hypotheses if h.status in (Status.CONFIRMED, Status.EXPLAINED)]
    return sorted(failed, key=lambda h: (h.status is Status.EXPLAINED, _rank_key(h)))


def _rank_key(hypothesis: Hypothesis) -> tuple[int, int, int]:
    """Sort key: earlier stage, then earlier and more frequent failures."""
    return hypothesis.check.stage, hypothesis.first_step or 0, -hypothesis.num_failed


def _could_explain(hypothesis: Hypothesis, effect: Hypothesis) -> bool:
    never = () if effect.finding is None else effect.finding.excludes
    return effect.check.name in hypothesis.check.explains and hypothesis.check.name not in never


def _missing_evidence(undecided: Sequence[Hypothesis], absent: frozenset[str]) -> tuple[str, ...]:
    fields = [need for h in undecided for need in h.check.deciding_fields if need in absent]
    return tuple(dict.fromkeys(fields))


def _is_stronger(new: Finding, old: Finding) -> bool:
    return VERDICT_WEIGHTS[new.verdict] >= VERDICT_WEIGHTS[old.verdict]
