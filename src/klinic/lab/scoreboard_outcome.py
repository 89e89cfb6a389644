"""The doctor's diagnosis of one trial, and its evaluation."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from klinic.checks import CHECKS
from klinic.checks.base import Case
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import Diagnosis, Examination, diagnose, rank_failures
from klinic.replay.proof import prove_cause

REMOVED_COLUMNS = {
    "logp_sampler": ("logp_sampler",),
    "logp_old": ("logp_old", "logp"),
}
"""Columns that are removed to measure the doctor with less evidence."""
HEALTHY = "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The diagnosis of one trial."""

    cause: str
    """The injected fault, or `healthy`."""
    mechanism: str
    severity: str
    seed: int
    named: str | None
    ranked: tuple[str, ...]
    """All confirmed causes: the likeliest first, then its effects."""
    missing: tuple[str, ...]
    first_step: int | None
    without: dict[str, str | None]
    """The named cause with a column removed."""
    seconds: float
    visible_at_start: bool = False
    proved: bool | None = None
    """Whether a counterfactual replay confirmed it; None if there was none."""
    error: str | None = None
    """The exception of a trial that failed and was not diagnosed."""

    @property
    def is_right(self) -> bool:
        """Whether the injected cause was named; for a healthy run, whether none was."""
        expected = None if self.cause == HEALTHY else self.cause
        return self.error is None and self.named == expected

    @property
    def is_abstention(self) -> bool:
        """Whether the doctor named no cause."""
        return self.error is None and self.named is None

    @property
    def is_wrong(self) -> bool:
        """Whether a wrong cause was named."""
        return self.named is not None and not self.is_right

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return asdict(self)


def diagnose_run(run: Path) -> tuple[Diagnosis, tuple[str, ...]]:
    """Diagnose a run; return the diagnosis and the names of the failed checks, ranked."""
    diagnosis = diagnose(read_cases(run), CHECKS)
    return diagnosis, tuple(rank_failures(diagnosis))


def confirm_by_replay(run: Path, diagnosis: Diagnosis) -> bool | None:
    """Return whether a replay confirms the cause; None if there is nothing to change."""
    if diagnosis.cause is None or diagnosis.first_step is None:
        return None
    # trusted: klinic's own code made this run
    proof = prove_cause(run, diagnosis.cause, diagnosis.first_step, run_code=True)
    return None if proof is None else proof.confirmed


def causes_without_columns(run: Path) -> dict[str, str | None]:
    """Return the named cause with each set of columns removed; reads the records once."""
    examinations = {name: Examination(CHECKS) for name in REMOVED_COLUMNS}
    for case in read_cases(run):
        for name, examination in examinations.items():
            examination.add_case(_without_columns(case, REMOVED_COLUMNS[name]))
    return {name: examination.conclude().cause for name, examination in examinations.items()}


def _without_columns(case: Case, columns: tuple[str, ...]) -> Case:
    def strip(record: Any) -> Any:
        return None if record is None else replace(record, **dict.fromkeys(columns))

    return replace(
        case,
        record=strip(case.record),
        earlier=tuple(strip(record) for record in case.earlier),
        start=strip(case.start),
    )
