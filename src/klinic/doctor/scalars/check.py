"""ScalarCheck and ScalarFinding, and helpers to read the columns of a log."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from klinic.evidence.readers.log import Column, ScalarLog
from klinic.evidence.verdict import Verdict

STREAK_LENGTH = 20  # logged steps: with one prompt per step, rewards are equal half of the time
MIN_STREAK_LENGTH = 3  # if the whole log is shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarFinding:
    """The result of a check on a log."""

    verdict: Verdict
    summary: str
    """One sentence with the measurement and its limit."""
    step: int | None = None
    """The first step that shows it."""
    could_be: tuple[str, ...] = ()
    """Causes that produce these scalars, the likeliest first; a single one is decided."""
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarCheck:
    """A check on the columns of a scalar log."""

    name: str
    needs: tuple[str, ...]
    """Required columns; `a|b` if one of them is enough."""
    check_log: Callable[[ScalarLog], ScalarFinding]
    decided_by: tuple[str, ...] = ()
    """Token-level fields that distinguish its causes."""

    @property
    def text(self) -> str:
        """A description: the first docstring line of the check function."""
        return (self.check_log.__doc__ or "").strip().splitlines()[0]

    def __call__(self, log: ScalarLog) -> ScalarFinding:
        """Run the check, or return a no-data finding that names the missing columns."""
        missing = [need for need in self.needs if not any(map(log.has_metric, need.split("|")))]
        if missing:
            names = " and ".join(need.replace("|", " or ") for need in missing)
            why = [reason for name, reason in log.trainer.why_none.items() if name in names.split()]
            return no_data(f"not logged: {names}{''.join(f' ({reason})' for reason in why)}")
        return self.check_log(log)


def fail(summary: str, step: int, *could_be: str, **measured: float) -> ScalarFinding:
    """Return a failed finding with the causes that produce such scalars."""
    return ScalarFinding(
        verdict=Verdict.FAIL, summary=summary, step=step, could_be=could_be, measured=measured
    )


def warn(summary: str, step: int | None = None, **measured: float) -> ScalarFinding:
    """Return a warning: worth knowing, but possibly healthy."""
    return ScalarFinding(verdict=Verdict.WARN, summary=summary, step=step, measured=measured)


def ok(summary: str, **measured: float) -> ScalarFinding:
    """Return a passed finding."""
    return ScalarFinding(verdict=Verdict.PASS, summary=summary, measured=measured)


def no_data(summary: str) -> ScalarFinding:
    """Return a no-data finding."""
    return ScalarFinding(verdict=Verdict.NO_DATA, summary=summary)


def finite_values(column: Sequence[float | None]) -> list[float]:
    """Return the finite values of a column."""
    return [value for value in column if value is not None and math.isfinite(value)]


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether a value was logged and is finite."""
    return value is not None and math.isfinite(value)


def median(values: Sequence[float]) -> float:
    """Return the median of a non-empty sequence; the upper one of two.

    >>> median([3.0, 1.0, 2.0])
    2.0
    """
    return sorted(values)[len(values) // 2]


def first_streak(
    flags: Sequence[bool | None], length: int = STREAK_LENGTH
) -> tuple[int, int] | None:
    """Return the first run of `length` true flags as (start, end), or None.

    None values are skipped. In a shorter log all flags must be true.

    >>> first_streak([False, True, True, None, True], length=3), first_streak([True, False, True])
    ((1, 5), None)
    """
    present = [(index, flag) for index, flag in enumerate(flags) if flag is not None]
    wanted = min(length, max(len(present), MIN_STREAK_LENGTH))
    start = count = 0
    for index, flag in present:
        if not flag:
            count = 0
            continue
        start = index if count == 0 else start
        count += 1
        if count == wanted:
            return start, index + 1
    return None


def apply_test(column: Column, test: Callable[[float], bool]) -> list[bool | None]:
    """Apply a test to every value; None where there is none."""
    return [None if value is None or math.isnan(value) else test(value) for value in column]


def format_number(value: float) -> str:
    """Return a number formatted for a message."""
    return f"{value:.3g}"


def finding_to_json(check: ScalarCheck, finding: ScalarFinding) -> dict[str, Any]:
    """Return a finding as `--json` prints it."""
    failed = finding.verdict is Verdict.FAIL
    status = {"fail": "confirmed", "pass": "not seen"}.get(finding.verdict, "undecided")
    return {
        "name": check.name,
        "status": status,
        "verdict": str(finding.verdict),
        "summary": finding.summary,
        "measured": dict(finding.measured),
        "first_step": finding.step,
        "could_be": list(finding.could_be),
        "decided_by": list(check.decided_by) if failed else [],
    }
