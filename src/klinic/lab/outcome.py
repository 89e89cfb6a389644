"""What the doctor said of one trial, and what that is worth."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from klinic.checks import CHECKS
from klinic.checks.base import Case
from klinic.doctor.diagnosis import Diagnosis, Examination, diagnose, ranked
from klinic.doctor.reading import read_cases
from klinic.probe.proof import prove

WITHOUT = {
    "logp_sampler": ("logp_sampler",),
    "logp_old": ("logp_old", "logp"),
}
"""Columns that are taken away to see how the doctor degrades."""
HEALTHY = "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trial, as the doctor saw it."""

    cause: str
    """The fault that was injected, or `healthy`."""
    mechanism: str
    severity: str
    seed: int
    named: str | None
    ranked: tuple[str, ...]
    """Everything that was confirmed, the likeliest cause first, and then its effects."""
    missing: tuple[str, ...]
    first_step: int | None
    without: dict[str, str | None]
    """What was named when a column was taken away."""
    seconds: float
    visible_at_start: bool = False
    proved: bool | None = None
    """Whether a replay with one thing changed confirmed it; None where none was made."""
    error: str | None = None
    """What the trial threw; then nothing was looked at."""

    @property
    def right(self) -> bool:
        """Whether the cause was named first; of a healthy run, whether none was."""
        expected = None if self.cause == HEALTHY else self.cause
        return self.error is None and self.named == expected

    @property
    def abstained(self) -> bool:
        """Whether the doctor looked and named nothing."""
        return self.error is None and self.named is None

    @property
    def wrong(self) -> bool:
        """Whether another cause was named."""
        return self.named is not None and not self.right

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def look(run: Path) -> tuple[Diagnosis, tuple[str, ...]]:
    """Diagnose a run; return what was found, and the checks that failed in their order."""
    found = diagnose(read_cases(run), CHECKS)
    return found, tuple(h.check.name for h in ranked(found.hypotheses))


def proved(run: Path, found: Diagnosis) -> bool | None:
    """Return whether a replay confirms the cause; None where there is nothing to change."""
    if found.cause is None or found.first_step is None:
        return None
    # the run was made here, by klinic's own code
    proof = prove(run, found.cause, found.first_step, run_code=True)
    return None if proof is None else proof.confirmed


def named_without(run: Path) -> dict[str, str | None]:
    """Return what is named when columns are missing; the records are read once."""
    examinations = {name: Examination(CHECKS) for name in WITHOUT}
    for case in read_cases(run):
        for name, examination in examinations.items():
            examination.hear(_stripped(case, WITHOUT[name]))
    return {name: examination.conclude().cause for name, examination in examinations.items()}


def _stripped(case: Case, columns: tuple[str, ...]) -> Case:
    def strip(record: Any) -> Any:
        return None if record is None else replace(record, **dict.fromkeys(columns))

    return replace(
        case,
        record=strip(case.record),
        earlier=tuple(strip(record) for record in case.earlier),
        start=strip(case.start),
    )
