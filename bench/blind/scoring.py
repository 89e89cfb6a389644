"""Counts right, wrong and missing causes of a blind set by names that were fixed beforehand."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CERTAIN = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The diagnosis of a case and whether it is right."""

    case: str
    decidable: str
    named: str | None
    confidence: float
    verdict: str
    """right, wrong, abstained; alarm or quiet for a healthy case."""


def judge(case: str, truth: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> Verdict:
    """Compare the first cause of a diagnosis with the names that count as right."""
    first = next(iter(diagnosis.get("causes") or []), {})
    named = first.get("name")
    if truth["decidable"] == "healthy":
        verdict = "alarm" if named else "quiet"
    elif named is None:
        verdict = "abstained"
    else:
        verdict = "right" if named in truth["accept"] else "wrong"
    return Verdict(
        case=case,
        decidable=truth["decidable"],
        named=named,
        confidence=float(first.get("confidence") or 0.0),
        verdict=verdict,
    )


def summary(verdicts: Iterable[Verdict]) -> dict[str, dict[str, int]]:
    """Return counts of verdicts by decidability, and of the causes that were stated as certain."""
    verdicts = list(verdicts)
    kinds = dict.fromkeys(v.decidable for v in verdicts)
    counts = {kind: Counter(v.verdict for v in verdicts if v.decidable == kind) for kind in kinds}
    certain = Counter(v.verdict for v in verdicts if v.named and v.confidence >= CERTAIN)
    return {kind: dict(count) for kind, count in counts.items()} | {"certain": dict(certain)}
