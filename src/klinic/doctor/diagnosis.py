"""Turns findings into a verdict: the causes, their probability, and what could decide more.

The first cause is stated if its probability is at least 0.9, see `weighing`. Below that it is
likely if it is the best explanation by causes with recorded evidence: a cause whose fields are
missing lowers the probability and is listed, and never hides a failed check. A second cause is
named if the first does not explain its check's failure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klinic.checks.base import Case, Check, Finding, no_data_finding
from klinic.doctor.advice import find_steps
from klinic.doctor.hypothesis import Hypothesis, Status
from klinic.doctor.process_cases import ProcessCases, judge_processes
from klinic.doctor.weighing import WeighedCause, weigh_causes
from klinic.evidence.dropped_records import NOTHING_DROPPED, DroppedRecords
from klinic.evidence.verdict import RunVerdict

NO_FAULT = "No fault found"
NO_FAULT_IN_KEPT = "No fault found in the records that are kept"
NAMED = 0.9  # probability from which a cause is stated without reserve
LIKELY = 0.6  # probability from which a cause beside the first is named, or a symptom is
LIKELY_AMONG_RECORDED = 0.4  # two causes that explain one another have a little less than half
NOT_EXCLUDED = 0.05  # probability from which another cause is listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause that the diagnosis names."""

    name: str
    confidence: float
    """Probability of the cause, given which checks failed and which had no evidence."""
    summary: str
    fix: str
    change: Mapping[str, Any]
    """The fix as recipe keys and values; empty for other trainers."""
    first_step: int | None
    steps: tuple[str, ...] = ()
    """The fix in the settings of another trainer, the most likely step first."""
    explains: tuple[str, ...] = ()
    """The failed checks that it accounts for, its own first."""

    @property
    def first_fix(self) -> str:
        """What to try first."""
        return self.steps[0] if self.steps else self.fix

    def to_json(self) -> dict[str, Any]:
        """Return the cause as JSON values."""
        return {
            "name": self.name,
            "confidence": round(self.confidence, 4),
            "explains": list(self.explains),
            "summary": self.summary,
            "fix": self.fix,
            "steps": list(self.steps),
            "change": dict(self.change),
            "first_step": self.first_step,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another cause that is not excluded: it explains a failure as well."""

    name: str
    probability: float
    fields: tuple[str, ...]
    """The missing fields that would decide; empty if its check failed."""

    def to_json(self) -> dict[str, Any]:
        """Return the rival as JSON values."""
        return {
            "name": self.name,
            "probability": round(self.probability, 4),
            "fields": list(self.fields),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a run: its causes, the most probable first, with the evidence."""

    causes: tuple[Cause, ...]
    hypotheses: tuple[Hypothesis, ...]
    rivals: tuple[Rival, ...]
    """Causes that could not be excluded."""
    missing: tuple[str, ...]
    """Unrecorded fields without which a cause cannot be named or excluded."""
    dropped: DroppedRecords = NOTHING_DROPPED
    """Steps that were not judged, because their records were dropped."""

    @property
    def unexplained(self) -> tuple[str, ...]:
        """The failed checks that no named cause accounts for."""
        explained = {name for cause in self.causes for name in cause.explains}
        failed = [h for h in self.hypotheses if h.num_failed]
        failed.sort(key=lambda h: h.check.stage)
        return tuple(h.check.name for h in failed if h.check.name not in explained)

    @property
    def first_cause(self) -> Cause | None:
        """The most probable cause."""
        return self.causes[0] if self.causes else None

    @property
    def cause(self) -> str | None:
        """The name of the most probable cause."""
        return None if self.first_cause is None else self.first_cause.name

    @property
    def confidence(self) -> float:
        """The probability of the most probable cause; 0 without one."""
        return 0.0 if self.first_cause is None else self.first_cause.confidence

    @property
    def fix(self) -> str | None:
        """The fix of the most probable cause."""
        return None if self.first_cause is None else self.first_cause.fix

    @property
    def change(self) -> Mapping[str, Any]:
        """The fix of the most probable cause as recipe keys and values."""
        return {} if self.first_cause is None else self.first_cause.change

    @property
    def first_step(self) -> int | None:
        """The first step that shows the most probable cause."""
        return None if self.first_cause is None else self.first_cause.first_step

    @property
    def verdict(self) -> RunVerdict:
        """Whether a cause is stated, likely, or not found."""
        if self.first_cause is None:
            return RunVerdict.NONE
        return RunVerdict.CAUSE if self.confidence >= NAMED else RunVerdict.LIKELY

    @property
    def sick(self) -> bool:
        """Whether a check failed, even if the cause cannot be named."""
        return any(h.num_failed for h in self.hypotheses)

    @property
    def headline(self) -> str:
        """The first line of the diagnosis."""
        first = self.first_cause
        if first is None:
            return self._headline_without_cause()
        where = "" if first.first_step is None else f", first seen in step {first.first_step}"
        if self.verdict is RunVerdict.CAUSE:
            return f"Cause: {first.name}{where}"
        return f"Most likely cause: {first.name} ({self.confidence:.0%}){where}"

    def _headline_without_cause(self) -> str:
        if self.sick:
            failed = ", ".join(self.unexplained)
            return f"No cause found, but something is wrong. Failed: {failed}"
        passed, num = len(self.with_status(Status.RULED_OUT)), len(self.hypotheses)
        start = (
            "No fault found in the records that are kept" if self.dropped.num_steps else NO_FAULT
        )
        if passed == num:
            return f"{start}: all {num} checks passed."
        return f"{start}: {passed} of {num} checks passed, none failed."

    @property
    def rivals_sentence(self) -> str:
        """The causes that are not excluded, and the fields that would decide; empty if none."""
        if not self.rivals:
            return ""
        return f"Not excluded: {'; '.join(_describe_rival(rival) for rival in self.rivals)}"

    @property
    def sentence(self) -> str:
        """The causes with their evidence and fixes, as one message."""
        if self.first_cause is None:
            return self.headline
        first, *others = self.causes
        start = "Cause" if self.verdict is RunVerdict.CAUSE else "Most likely cause"
        more = "".join(f" Also: {c.name} ({c.summary}). Fix: {c.first_fix}" for c in others)
        return f"{start}: {first.name} ({first.summary}). Fix: {first.first_fix}{more}"

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as in `--json` and diagnosis.json."""
        return {
            "verdict": str(self.verdict),
            "cause": self.cause if self.verdict is RunVerdict.CAUSE else None,
            "confidence": round(self.confidence, 4),
            "causes": [cause.to_json() for cause in self.causes],
            "unexplained": list(self.unexplained),
            "findings": [h.to_json() for h in self.hypotheses],
            "ruled_out": [h.check.name for h in self.with_status(Status.RULED_OUT)],
            "not_excluded": [rival.to_json() for rival in self.rivals],
            "missing": list(self.missing),
            "not_read": [],
            "dropped": self.dropped.to_json(),
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
        self._trainer: str | None = None
        self._has_engine = False
        self._last_case: Case | None = None
        self._missing_fields: frozenset[str] | None = None
        self._processes = ProcessCases()

    def add_case(self, case: Case) -> None:
        """Run every check on a case."""
        self._last_case = case
        self.set_trainer(case.run)
        cases = self._processes.split(case)
        for hypothesis in self.hypotheses:
            whole = run_check(hypothesis.check, case)
            finding = judge_processes(hypothesis.check, whole, cases, run_check)
            hypothesis.add_finding(case.record.step, finding)

    def set_trainer(self, facts: Mapping[str, Any]) -> None:
        """Read from run.json which trainer wrote the run and what sampled: fixes depend on it."""
        trainer, sampler = facts.get("trainer"), facts.get("sampler")
        self._trainer = trainer if isinstance(trainer, str) else None
        self._has_engine = isinstance(sampler, Mapping) and sampler.get("shares_weights") is False

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
        return conclude(
            self.hypotheses,
            self.missing_fields,
            trainer=self._trainer,
            has_engine=self._has_engine,
        )


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


def conclude(
    hypotheses: Sequence[Hypothesis],
    absent: frozenset[str],
    *,
    trainer: str | None = None,
    has_engine: bool = False,
) -> Diagnosis:
    """Weigh all causes and set the status of each hypothesis; `absent` fields are unrecorded."""
    weighed = weigh_causes(hypotheses, absent)
    named = _select_causes(weighed, weigh_causes(hypotheses, frozenset()))
    _assign_statuses(hypotheses, named)
    rivals = [
        Rival(
            name=w.hypothesis.check.name,
            probability=w.probability,
            fields=() if w.hypothesis.num_failed else _absent_fields([w.hypothesis], absent),
        )
        for w in weighed
        if w not in named and w.probability >= NOT_EXCLUDED
    ]
    if weighed:
        missing = tuple(dict.fromkeys(name for rival in rivals for name in rival.fields))
    else:
        missing = _absent_fields([h for h in hypotheses if not h.num_judged], absent)
    steps = [find_steps(w.hypothesis.check.name, trainer, has_engine=has_engine) for w in named]
    return Diagnosis(
        causes=tuple(
            _describe_cause(weighed_cause, hypotheses, its_steps)
            for weighed_cause, its_steps in zip(named, steps, strict=True)
        ),
        hypotheses=tuple(hypotheses),
        rivals=tuple(rivals),
        missing=missing,
    )


def _select_causes(
    weighed: Sequence[WeighedCause], among_recorded: Sequence[WeighedCause]
) -> list[WeighedCause]:
    """Return the causes to name, the most probable first.

    `among_recorded` are the probabilities if only causes with recorded evidence are possible.
    """
    failed = [w for w in weighed if w.hypothesis.num_failed]
    named = [w for w in failed if w.probability >= LIKELY]
    if named or not failed:
        return named
    best = next((w for w in among_recorded if not w.hypothesis.check.is_symptom), None)
    if best is None or best.probability < LIKELY_AMONG_RECORDED:
        return []
    return [w for w in failed if w.hypothesis is best.hypothesis]


def _describe_cause(
    weighed: WeighedCause, hypotheses: Sequence[Hypothesis], steps: tuple[str, ...]
) -> Cause:
    hypothesis = weighed.hypothesis
    check, finding = hypothesis.check, hypothesis.finding
    effects = [h.check.name for h in hypotheses if h.num_failed and hypothesis.explains(h)]
    return Cause(
        name=check.name,
        confidence=weighed.probability,
        summary="" if finding is None else finding.summary,
        fix=check.fix,
        change={} if steps else check.change,
        first_step=hypothesis.first_step,
        steps=steps,
        explains=(check.name, *effects),
    )


def _describe_rival(rival: Rival) -> str:
    if rival.fields:
        return f"{rival.name} (needs {', '.join(rival.fields)})"
    return f"{rival.name} ({rival.probability:.0%})"


def _assign_statuses(hypotheses: Sequence[Hypothesis], named: Sequence[WeighedCause]) -> None:
    causes = [w.hypothesis for w in named]
    for hypothesis in hypotheses:
        if hypothesis in causes:
            hypothesis.status = Status.CONFIRMED
        elif hypothesis.num_failed:
            explained = any(cause.explains(hypothesis) for cause in causes)
            hypothesis.status = Status.EXPLAINED if explained else Status.CONFIRMED
        elif hypothesis.num_judged and not hypothesis.num_warned:
            hypothesis.status = Status.RULED_OUT


def rank_failures(diagnosis: Diagnosis) -> list[str]:
    """Return the names of the failed checks: named causes, other causes, then effects."""
    names = [cause.name for cause in diagnosis.causes]
    for status in (Status.CONFIRMED, Status.EXPLAINED):
        failed = sorted(diagnosis.with_status(status), key=lambda h: h.check.stage)
        names += [h.check.name for h in failed if h.check.name not in names]
    return names


def _absent_fields(hypotheses: Sequence[Hypothesis], absent: frozenset[str]) -> tuple[str, ...]:
    fields = [need for h in hypotheses for need in h.check.deciding_fields if need in absent]
    return tuple(dict.fromkeys(fields))
