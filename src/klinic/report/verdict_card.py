"""The verdict of a report: one shape for a diagnosis of records and one of scalars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klinic.checks import CHECKS
from klinic.doctor.diagnosis import Cause, Diagnosis
from klinic.doctor.hypothesis import Hypothesis, Status
from klinic.doctor.scalars.examine import ScalarCause, ScalarDiagnosis
from klinic.doctor.scalars.sentences import headline_text
from klinic.evidence.verdict import RunVerdict, Verdict

MAX_CAUSES = 3  # causes of a scalar log that are described; the others are listed
DESCRIPTIONS: Mapping[str, str] = {check.name: check.description for check in CHECKS}
GROUPS = (
    ("failed", (Status.CONFIRMED, Status.EXPLAINED)),
    ("undecided", (Status.UNDECIDED,)),
    ("ruled out", (Status.RULED_OUT,)),
)
SCALAR_GROUPS = (
    ("failed", Verdict.FAIL),
    ("worth a look", Verdict.WARN),
    ("passed", Verdict.PASS),
    ("without data", Verdict.NO_DATA),
)
EXACT, CERTAIN, LIKELY = 0.99, 0.9, 0.6  # probabilities from which a word is used


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseCard:
    """One named cause."""

    name: str
    description: str
    """The fault in one clause."""
    confidence: float
    summary: str
    """The measurement."""
    first_step: int | None
    may_be_older: bool
    """Whether no step before the first one could be judged."""
    steps: tuple[str, ...]
    change: Mapping[str, Any]
    effects: tuple[str, ...]
    """Other failed checks that this cause accounts for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """One check with its result."""

    mark: str
    name: str
    description: str
    summary: str
    first_step: int | None = None
    """The first step in which it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictCard:
    """The verdict of a run."""

    headline: str
    tone: str
    """`good`, `unsure` or `bad`."""
    causes: tuple[CauseCard, ...]
    rivals: tuple[tuple[str, str], ...]
    """Causes that are not excluded: name and description, with probability or missing fields."""
    unexplained: tuple[str, ...]
    """Failed checks that no named cause accounts for."""
    missing: tuple[str, ...]
    groups: tuple[tuple[str, tuple[CheckLine, ...]], ...]
    """Every check, in groups by result."""
    limits: str = ""
    """What this evidence cannot show."""

    @property
    def is_folded(self) -> bool:
        """Whether a cause is named, so that the list of checks can stay closed."""
        return bool(self.causes) or self.tone == "good"


def certainty(confidence: float) -> str:
    """Return a probability with a word for it.

    >>> certainty(0.999), certainty(0.93), certainty(0.7), certainty(0.4)
    ('over 99%, practically certain', '93%, very likely', '70%, likely', '40%, one of several')
    """
    if confidence >= EXACT:
        return "over 99%, practically certain"
    words = (
        "very likely"
        if confidence >= CERTAIN
        else "likely"
        if confidence >= LIKELY
        else "one of several"
    )
    return f"{confidence:.0%}, {words}"


def card_of_records(diagnosis: Diagnosis) -> VerdictCard:
    """Return the verdict card of a diagnosis of records."""
    tone = "bad" if diagnosis.sick else "good"
    if diagnosis.verdict is RunVerdict.LIKELY:
        tone = "unsure"
    return VerdictCard(
        headline=diagnosis.headline,
        tone=tone,
        causes=tuple(_cause_card(cause, diagnosis.hypotheses) for cause in diagnosis.causes),
        rivals=tuple(
            (
                rival.name,
                f"{DESCRIPTIONS.get(rival.name, '')} "
                + (
                    f"(not recorded: {', '.join(rival.fields)})"
                    if rival.fields
                    else f"({rival.probability:.0%})"
                ),
            )
            for rival in diagnosis.rivals
        ),
        unexplained=diagnosis.unexplained,
        missing=diagnosis.missing,
        groups=_group_lines(
            (title, [h for status in statuses for h in diagnosis.with_status(status)])
            for title, statuses in GROUPS
        ),
    )


def _cause_card(cause: Cause, hypotheses: Sequence[Hypothesis]) -> CauseCard:
    own = [h for h in hypotheses if h.check.name == cause.name]
    return CauseCard(
        name=cause.name,
        description=DESCRIPTIONS.get(cause.name, ""),
        confidence=cause.confidence,
        summary=cause.summary,
        first_step=cause.first_step,
        may_be_older=any(
            (h.first_step or 0) > 1 and h.num_judged == h.num_judged_since for h in own
        ),
        steps=cause.steps or (cause.fix,),
        change=cause.change,
        effects=tuple(name for name in cause.explains if name != cause.name),
    )


def _group_lines(groups: Any) -> tuple[tuple[str, tuple[CheckLine, ...]], ...]:
    return tuple(
        (title, tuple(_check_line(h) for h in sorted(some, key=lambda h: h.check.stage)))
        for title, some in groups
        if some
    )


def _check_line(hypothesis: Hypothesis) -> CheckLine:
    finding = hypothesis.finding
    return CheckLine(
        mark=hypothesis.status.mark,
        name=hypothesis.check.name,
        description=hypothesis.check.description,
        summary="" if finding is None else finding.summary,
        first_step=hypothesis.first_step,
    )


def card_of_scalars(diagnosis: ScalarDiagnosis) -> VerdictCard:
    """Return the verdict card of a scalar log."""
    failed = diagnosis.with_verdict(Verdict.FAIL)
    is_unread = diagnosis.verdict is RunVerdict.UNREAD
    tone = "unsure" if is_unread or (failed and diagnosis.cause is None) else "good"
    if diagnosis.cause is not None:
        tone = "bad"
    first_step = failed[0][1].step if failed else None
    summary = failed[0][1].summary if failed else ""
    named = diagnosis.causes[:MAX_CAUSES]
    return VerdictCard(
        headline=headline_text(diagnosis),
        tone=tone,
        causes=tuple(_scalar_cause_card(cause, summary, first_step) for cause in named),
        rivals=tuple(
            (cause.name, f"{DESCRIPTIONS.get(cause.name, '')} ({cause.confidence:.0%})")
            for cause in diagnosis.causes[MAX_CAUSES:]
        ),
        unexplained=(),
        missing=diagnosis.missing if diagnosis.sick else (),
        groups=tuple(
            (title, tuple(_sign_lines(diagnosis, verdict)))
            for title, verdict in SCALAR_GROUPS
            if diagnosis.with_verdict(verdict)
        ),
        limits="Step means show that something is wrong, but seldom the cause; token records do. "
        + diagnosis.log.trainer.klinic_records,
    )


def _scalar_cause_card(cause: ScalarCause, summary: str, first_step: int | None) -> CauseCard:
    return CauseCard(
        name=cause.name,
        description=DESCRIPTIONS.get(cause.name, ""),
        confidence=cause.confidence,
        summary=summary,
        first_step=first_step,
        may_be_older=False,
        steps=cause.steps,
        change={},
        effects=(),
    )


def _sign_lines(diagnosis: ScalarDiagnosis, verdict: Verdict) -> Sequence[CheckLine]:
    return [
        CheckLine(
            mark=finding.verdict.mark,
            name=sign.name,
            description=sign.text.rstrip("."),
            summary=finding.summary,
            first_step=finding.step if verdict is Verdict.FAIL else None,
        )
        for sign, finding in diagnosis.with_verdict(verdict)
    ]
