"""temperature-on-one-side: the temperature divides the logits of one side only."""

from dataclasses import dataclass

import numpy as np

from klinic.checks import after_sync
from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import column, difference, fraction, known_tokens, mean

SLOPE = 0.05  # of the gap over logp + entropy: a temperature off by 5%
EXPLAINED = 0.8  # fraction of the gap that the line must explain: other faults scatter
NOISE = 0.03  # nats: root mean square of bf16 against fp32 (a model of 0.5B, public reports)
LARGEST = 4.0  # times the temperature, or a quarter: beyond it the sides are unrelated
BOTH = 0.05  # min fraction of tokens on each side of 0: truncation only raises them
TRIMMED = 0.25  # fraction of tokens with the largest gaps, excluded from the fit
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag log-probs of one side that belong to another temperature.

    Looks for
        A straight line. For a softmax at inverse temperature b, the log-prob of a token at b'
        differs by about s = b'/b - 1 times logp + entropy, both of which are recorded, less
        half of s squared times the variance of logp, which lowers the line and never raises it.
        So such a line is fitted to the gap between sampler and learner and, before the first
        update, when policy and reference are equal, to the gap between these two.
    Why it matters
        Every ratio and every KL then compares two different distributions: a KL above 0 with
        equal weights, importance ratios far from 1, and a pull towards an unintended policy.
    Confirmed when
        Right after a sync, an engine's log-probs are five times nearer to the policy's at
        temperature 1 than at the run's own; or the slope is above 0.05, that of a temperature
        at most four times off, and the line explains 80% of a gap that is above rounding and
        goes both ways.
    Ruled out when
        The gap is at the level of rounding, or the line does not explain it.
    Confused with
        hidden-sampling-transform (the gap is on one side of 0 and bounded); stale-sampler (no
        gap before the first update); misaligned-logp (no line, and a shift removes the gap).
    """
    sync = after_sync.named(case.answers.get("sampler_sync"), after_sync.dtype_of(case.run))
    if sync is not None and sync.cause == after_sync.TEMPERATURE:
        return failed(sync.summary)
    sides = {} if case.record.logp_sampler is None else {"sampler": "logp_sampler"}
    if case.record.facts.get("learner_version") == 0 and case.record.logp_ref is not None:
        sides["reference"] = "logp_ref"
    found = {side: fit(case, column) for side, column in sides.items()}
    known = {side: line for side, line in found.items() if line is not None}
    if not known:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    side = max(known, key=lambda s: abs(known[s].slope))
    line = known[side]
    slope, explained, size = line.slope, line.explained, line.gap
    likely = 1 / LARGEST < 1 + slope < LARGEST
    steep = likely and abs(slope) > SLOPE and size > NOISE
    wrong = steep and explained > EXPLAINED and line.lesser > BOTH
    summary = (
        f"{side} against learner: slope {slope:+.3f} over logp + entropy (limit {SLOPE:g}), which "
        f"explains {max(explained, 0):.0%} of a gap of {size:.3g} nats"
    )
    return (failed if wrong else passed)(summary, slope=slope, explained=explained, gap=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line fitted to the gap over logp + entropy."""

    slope: float
    explained: float
    """Fraction of the squared gap that it explains."""
    gap: float
    """Root mean square."""
    lesser: float
    """Fraction of the tokens on the side of 0 with fewer tokens."""


def fit(case: Case, name: str) -> Line | None:
    """Fit a line to the gap between a column and the learner's log-probs; None if too few."""
    record = case.record
    known = known_tokens(record, "logp_old", name, "entropy")
    if np.count_nonzero(known) < ENOUGH:
        return None
    gap = difference(record, name, "logp_old")[known]
    surprise = (column(record, "logp_old") + column(record, "entropy"))[known]
    usual = np.argsort(np.abs(gap))[: max(1, round((1 - TRIMMED) * gap.size))]
    gap, surprise = gap[usual], surprise[usual]
    size = float(np.sqrt(mean(gap**2)))
    along = float(np.sum(surprise**2))
    if size == 0 or along == 0:
        return Line(slope=0.0, explained=0.0, gap=size, lesser=0.0)
    centre = min(_centre(gap, surprise), 0.0)
    slope = float(np.sum((gap - centre) * surprise)) / along
    left = float(np.sum((gap - centre - slope * surprise) ** 2))
    return Line(
        slope=slope,
        explained=1 - left / float(np.sum(gap**2)),
        gap=size,
        lesser=min(fraction(gap > 0), fraction(gap < 0)),
    )


def _centre(gap: np.ndarray, surprise: np.ndarray) -> float:
    """Return the intercept of the least-squares line."""
    spread = float(np.var(surprise))
    if not spread:
        return 0.0
    height, along = mean(gap), mean(surprise)
    tilt = mean((gap - height) * (surprise - along)) / spread
    return height - tilt * along


CHECK = Check(
    name="temperature-on-one-side",
    stage=Stage.SAMPLER,
    needs=("record.logp_old", "record.entropy"),
    fix="Divide the logits by the same temperature for every log-prob: sampler (processed "
    "log-probs), learner, reference. Never divide log-probs.",
    judge=judge,
    also=("record.logp_sampler",),
    explains=("wrong-reference", "imprecise-logp", "hidden-sampling-transform", "step-too-big"),
)
