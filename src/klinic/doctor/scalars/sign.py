"""ScalarCheck and ScalarFinding, and helpers to read the columns of a log."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from klinic.evidence.readers.log import Column, ScalarLog
from klinic.evidence.verdict import Verdict

IN_A_ROW = 20  # logged steps: with one prompt per step, rewards are equal half of the time
AT_LEAST = 3  # if the whole log is shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The result of a check on a log."""

    says: Verdict
    summary: str
    """One sentence with the measurement and its limit."""
    step: int | None = None
    """The first step that shows it."""
    could_be: tuple[str, ...] = ()
    """Causes that produce these scalars, the likeliest first; a single one is decided."""
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A check on the columns of a scalar log."""

    name: str
    needs: tuple[str, ...]
    """Required columns; `a|b` if one of them is enough."""
    look: Callable[[ScalarLog], Heard]
    decided_by: tuple[str, ...] = ()
    """Token-level fields that distinguish its causes."""

    @property
    def text(self) -> str:
        """A description: the first docstring line of the check function."""
        return (self.look.__doc__ or "").strip().splitlines()[0]

    def __call__(self, log: ScalarLog) -> Heard:
        """Run the check, or return a no-data finding that names the missing columns."""
        missing = [need for need in self.needs if not any(map(log.has, need.split("|")))]
        if missing:
            names = " and ".join(need.replace("|", " or ") for need in missing)
            why = [said for name, said in log.trainer.why_none.items() if name in names.split()]
            return no_data(f"not logged: {names}{''.join(f' ({said})' for said in why)}")
        return self.look(log)


def fail(summary: str, step: int, *could_be: str, **measured: float) -> Heard:
    """Return a failed finding with the causes that produce such scalars."""
    return Heard(
        says=Verdict.FAIL, summary=summary, step=step, could_be=could_be, measured=measured
    )


def warn(summary: str, step: int | None = None, **measured: float) -> Heard:
    """Return a warning: worth knowing, but possibly healthy."""
    return Heard(says=Verdict.WARN, summary=summary, step=step, measured=measured)


def well(summary: str, **measured: float) -> Heard:
    """Return a passed finding."""
    return Heard(says=Verdict.PASS, summary=summary, measured=measured)


def no_data(summary: str) -> Heard:
    """Return a no-data finding."""
    return Heard(says=Verdict.NO_DATA, summary=summary)


def finite(column: Sequence[float | None]) -> list[float]:
    """Return the finite values of a column."""
    return [value for value in column if value is not None and math.isfinite(value)]


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether a value was logged and is finite."""
    return value is not None and math.isfinite(value)


def median(values: Sequence[float]) -> float:
    """Return the median of a non-empty sequence; the upper one of two.

    >>> median([3.0, 1.0, 2.0])
    2.0
    """
    return sorted(values)[len(values) // 2]


def stretch(flags: Sequence[bool | None], length: int = IN_A_ROW) -> tuple[int, int] | None:
    """Return the first run of `length` true flags as (start, end), or None.

    None values are skipped. In a shorter log all flags must be true.

    >>> stretch([False, True, True, None, True], length=3), stretch([True, False, True])
    ((1, 5), None)
    """
    known = [(place, flag) for place, flag in enumerate(flags) if flag is not None]
    wanted = min(length, max(len(known), AT_LEAST))
    start = count = 0
    for place, flag in known:
        if not flag:
            count = 0
            continue
        start = place if count == 0 else start
        count += 1
        if count == wanted:
            return start, place + 1
    return None


def flags_of(column: Column, test: Callable[[float], bool]) -> list[bool | None]:
    """Apply a test to every value; None where there is none."""
    return [None if value is None or math.isnan(value) else test(value) for value in column]


def shown(value: float) -> str:
    """Return a number formatted for a message."""
    return f"{value:.3g}"


def to_json(sign: Sign, heard: Heard) -> dict[str, Any]:
    """Return a finding as `--json` prints it."""
    failed = heard.says is Verdict.FAIL
    status = {"fail": "confirmed", "pass": "not seen"}.get(heard.says, "undecided")
    return {
        "name": sign.name,
        "status": status,
        "verdict": str(heard.says),
        "summary": heard.summary,
        "measured": dict(heard.measured),
        "first_step": heard.step,
        "could_be": list(heard.could_be),
        "decided_by": list(sign.decided_by) if failed else [],
    }
