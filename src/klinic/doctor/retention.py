"""Warning sign of lost skills: retention fell by more than chance.

    sign                 figure                             limit    and
    retention dropping   eval/retention below its start     > 0.05   > 2 standard errors

Both evaluations use the same prompts, so the error of independent samples is conservative.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from klinic.doctor.warning_signs import Sign, Signs, Watched, told

LOST = 0.05  # of the score before the first step
ERRORS = 2.0  # standard errors
FORGETTING = "retention dropping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """The setup of every evaluation."""

    num: int
    """Number of prompts per skill, or of retention rows."""
    trained: str | None = None
    """The trained skill, which does not count for retention."""


def watch_retention(
    signs: Signs, now: Mapping[str, float], before: Mapping[str, float], exam: Exam
) -> Watched:
    """Return the state after an evaluation, with the sign if it is new.

    `before` is the evaluation before the first step. Needs accuracies or mean rewards between 0 and
    1: for other values the mean does not determine the error, and no sign is raised.
    """
    kept = now.get("eval/retention")
    pairs = [(before[name], now[name]) for name in _others(now, before, exam.trained)]
    if kept is None or not pairs or not all(0 <= p <= 1 for pair in pairs for p in pair):
        return Watched(signs=signs, new=[])
    error = _error_of_retention(pairs, exam.num)
    lost, limit = 1 - kept, max(LOST, ERRORS * error)
    return told(signs, FORGETTING, lost > limit, lambda: _forgetting_sign(lost, limit, error))


def _error_of_retention(pairs: Sequence[tuple[float, float]], num: int) -> float:
    """Return the standard error of the mean of now / before.

    Formula: sqrt(sum (v(now) + v(before)) / before^2) / k, v(p) = q (1 - q) / (n + 2) with
    q = (n p + 1) / (n + 2), since a fraction of 0 or 1 out of few prompts is uncertain.
    Source: Agresti and Caffo, "Simple and effective confidence intervals for proportions" (2000).
    """

    def variance(share: float) -> float:
        adjusted = (num * share + 1) / (num + 2)
        return adjusted * (1 - adjusted) / (num + 2)

    total = sum((variance(now) + variance(before)) / before**2 for before, now in pairs)
    return math.sqrt(total) / len(pairs)


def _others(
    now: Mapping[str, float], before: Mapping[str, float], trained: str | None
) -> list[str]:
    """Return the retained metrics: of untrained skills, nonzero before the first step."""
    names = [name for name in before if name.startswith("eval/accuracy/")]
    names = [name for name in names if name != f"eval/accuracy/{trained}"]
    names = names or ["eval/retention_reward"]
    return [name for name in names if before.get(name, 0.0) > 0 and name in now]


def _forgetting_sign(lost: float, limit: float, error: float) -> Sign:
    return Sign(
        name=FORGETTING,
        sentence=(
            f"Retention fell by {lost:.3f} since the first step (limit {limit:.3f}, standard error "
            f"{error:.3f}): the policy forgets skills that are not trained. Raise kl.coef, or "
            "return to an earlier checkpoint."
        ),
        facts={"figure": lost, "limit": limit, "unit": "share of the start", "error": error},
    )
