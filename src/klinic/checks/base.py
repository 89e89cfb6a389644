"""What a check is, what it may see, and what it says.

A check looks for one cause. It reads a `Case`: the record of a step, those before it, run.json, the
metrics, and answers of the live learner where there is one. What it needs and does not find is
named; missing data is never a pass.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from klinic.evidence.record import StepRecord


class Verdict(StrEnum):
    """What a check says of a step."""

    PASS = "pass"  # noqa: S105 - a verdict
    WARN = "warn"
    FAIL = "fail"
    NO_DATA = "no data"


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


@runtime_checkable
class Probe(Protocol):
    """The live learner, asked once more; NumPy in and out. Its answers are kept as evidence."""

    def score(self, record: StepRecord, *, temperature: float | None = None) -> np.ndarray:
        """Return the policy's log-probs of the record's tokens, at another temperature if given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a check may see."""

    record: StepRecord
    earlier: tuple[StepRecord, ...] = ()
    """Records of steps before, the oldest first."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """run.json."""
    metrics: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Lines of metrics.jsonl by step, up to this one."""
    probe: Probe | None = None

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
            case "probe":
                return self.probe is not None and hasattr(self.probe, name)
            case "history":
                return len(self.earlier) >= int(name)
        raise KeyError(need)

    def gap(self, one: str, other: str) -> Float[np.ndarray, "K"]:
        """Return the difference of two log-prob columns on trained tokens that have both."""
        a, b = (np.asarray(getattr(self.record, name), dtype=np.float64) for name in (one, other))
        known = self.record.loss_mask & np.isfinite(a) & np.isfinite(b)
        return (a - b)[known]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found in a step."""

    verdict: Verdict
    summary: str
    """One sentence with the figure and its limit."""
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A cause, and the test that tells it from the others."""

    name: str
    stage: Stage
    needs: tuple[str, ...]
    """`record.x`, `facts.x`, `run.x`, `metrics.x`, `probe.x`, or `history.5`: five steps before."""
    fix: str
    judge: Callable[[Case], Finding]
    change: Mapping[str, Any] = field(default_factory=dict)
    """The fix as keys of a recipe, where it is one."""
    explains: tuple[str, ...] = ()
    """Checks that fail as well where this cause is at work."""

    @property
    def text(self) -> str:
        """What the check looks for and when it is confirmed: the docstring of `judge`."""
        return inspect.getdoc(self.judge) or ""

    def __call__(self, case: Case) -> Finding:
        """Judge a case, or say what is missing."""
        missing = case.missing(self.needs)
        if missing:
            listed = ", ".join(f"`{need}`" for need in missing)
            return Finding(verdict=Verdict.NO_DATA, summary=f"not recorded: {listed}")
        return self.judge(case)


def passed(summary: str, **measured: float) -> Finding:
    """Return a finding that all is well."""
    return Finding(verdict=Verdict.PASS, summary=summary, measured=measured)


def failed(summary: str, **measured: float) -> Finding:
    """Return a finding that the cause is there."""
    return Finding(verdict=Verdict.FAIL, summary=summary, measured=measured)


def no_data(summary: str) -> Finding:
    """Return a finding that what was recorded does not decide."""
    return Finding(verdict=Verdict.NO_DATA, summary=summary)
