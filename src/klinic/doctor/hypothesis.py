"""A hypothesis: one cause, and the findings of its check over the steps of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from klinic.checks.base import Check, Finding
from klinic.evidence.verdict import Verdict

VERDICT_WEIGHTS = {Verdict.NO_DATA: 0, Verdict.PASS: 1, Verdict.WARN: 2, Verdict.FAIL: 3}
"""Of two findings the one with the higher weight is reported."""


class Status(StrEnum):
    """The state of a hypothesis."""

    CONFIRMED = "confirmed"
    """Its check failed, and no other cause explains that."""
    EXPLAINED = "explained"
    """Its check failed, probably as an effect of another cause."""
    RULED_OUT = "ruled out"
    """Its check passed in every step that it could judge."""
    UNDECIDED = "undecided"
    """Its evidence was not recorded, or its check warned and never failed."""

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
    num_judged_since: int = 0
    """Judged steps from the first failure on."""
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
        if finding.verdict is not Verdict.NO_DATA and self.first_step is not None:
            self.num_judged_since += 1
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
            "judged_since": self.num_judged_since,
            "first_step": self.first_step,
            "status": str(self.status),
            "finding": None if finding is None else finding.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.num_judged, self.num_warned = state["judged"], state["warned"]
        self.num_failed, self.first_step = state["failed"], state["first_step"]
        self.num_judged_since = state.get("judged_since", self.num_failed)
        self.status = Status(state["status"])
        finding = state["finding"]
        self.finding = None if finding is None else Finding.from_json(finding)

    def merge_later(self, later: "Hypothesis") -> None:
        """Add the findings of the same check in later steps."""
        earlier_failure = self.first_step is not None
        self.num_judged_since += later.num_judged if earlier_failure else later.num_judged_since
        self.num_judged += later.num_judged
        self.num_warned += later.num_warned
        self.num_failed += later.num_failed
        if earlier_failure or later.finding is None:
            return
        fails = later.first_step is not None
        if fails or self.finding is None or _is_stronger(later.finding, self.finding):
            self.finding, self.first_step = later.finding, later.first_step

    @property
    def persistence(self) -> float:
        """Fraction of the steps that failed from the first failure on; 0 if none failed."""
        return self.num_failed / self.num_judged_since if self.num_judged_since else 0.0

    def explains(self, effect: "Hypothesis") -> bool:
        """Whether this cause can produce the finding of another check."""
        never = () if effect.finding is None else effect.finding.excludes
        return effect.check.name in self.check.explains and self.check.name not in never

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


def _is_stronger(new: Finding, old: Finding) -> bool:
    return VERDICT_WEIGHTS[new.verdict] >= VERDICT_WEIGHTS[old.verdict]
