"""temperature-on-one-side: the temperature divides the logits of one side only."""

from dataclasses import dataclass

import numpy as np

from klinic.checks import sampler_sync
from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.gap_contexts import context_slope
from klinic.checks.gap_models import GapFit, GapModel, compete_on_sampler_gap
from klinic.checks.gap_tokens import collect_gap_tokens
from klinic.checks.measures import (
    OLDER_SAMPLES,
    column_difference,
    finite_trained_tokens,
    float64_column,
    fraction_true,
    has_older_samples,
    mean,
    rms_logp_gap,
)

MAX_SLOPE_ERROR = 0.2  # of the slope of declared raw log-probs, in a step with few tokens
MIN_SLOPE = 0.05  # of the gap over logp + entropy: a temperature off by 5%
MIN_EXPLAINED_FRACTION = 0.8  # fraction of the gap that the line must explain: other faults scatter
MAX_NOISE = 0.03  # nats: root mean square of bf16 against fp32 (a model of 0.5B, public reports)
MAX_TEMPERATURE_RATIO = (
    4.0  # times the temperature, or a quarter: beyond it the sides are unrelated
)
MIN_MINORITY_FRACTION = (
    0.05  # min fraction of tokens on each side of 0: truncation only raises them
)
ROUNDING = 1e-4  # nats: smaller gaps have no sign
TRIMMED_FRACTION = 0.25  # fraction of tokens with the largest gaps, excluded from the fit
MIN_START_GAP = 0.2  # min fraction of the gap that the first step has: settings do not change
MIN_LATE_FIT = 0.97  # fraction explained of a gap that the first step has not
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag log-probs of one side that belong to another temperature.

    Looks for
        A straight line. For a softmax at inverse temperature b, the log-prob of a token at b'
        differs by about s = b'/b - 1 times logp + entropy, both of which are recorded, less
        half of s squared times the variance of logp, which lowers the line and never raises it.
        So such a line is fitted to the gap between sampler and learner and, before the first
        update, when policy and reference are equal, to the gap between these two. A sharp
        policy bends the line: for the sampler, s times logp plus any function of the entropy is
        fitted on half of the rows.
    Why it matters
        Every ratio and every KL then compares two different distributions: a KL above 0 with
        equal weights, importance ratios far from 1, and a pull towards an unintended policy.
    Confirmed when
        Right after a sync, an engine's log-probs are five times nearer to the policy's at
        temperature 1 than at the run's own; or the slope is above 0.05, that of a temperature
        at most four times off, and the line explains 80% of a gap that is above rounding and
        goes both ways, and as much of the variance of that side; or the bent line explains half
        of it in the other rows (97% if the first step had no gap: a setting that changed, which
        holds for the straight line too), and no other explanation explains more. Without
        entropies: among tokens that were sampled after the same context, the line over logp alone
        explains nine tenths of the differences of the gap.
    Ruled out when
        The gap is at the level of rounding, or the line does not explain it, or its slope is that
        of the run's own temperature and the sampler is declared to report raw log-probs.
    Confused with
        hidden-sampling-transform (the gap is on one side of 0 and bounded); stale-sampler (no
        gap before the first update); misaligned-logp (no line, and a shift removes the gap).
    """
    sync = sampler_sync.diagnose_sync(
        case.probe_results.get("sampler_sync"), sampler_sync.sampler_dtype(case.run)
    )
    if sync is not None and sync.cause == sampler_sync.TEMPERATURE:
        return failed_finding(sync.summary)
    sides = {"sampler": "logp_sampler"}
    if case.record.logp_sampler is None or has_older_samples(case.record):
        sides = {}
    if case.record.facts.get("learner_version") == 0 and case.record.logp_ref is not None:
        sides["reference"] = "logp_ref"
    fits = {side: fit_gap_line(case, column) for side, column in sides.items()}
    lines = {side: line for side, line in fits.items() if line is not None}
    if not lines and has_older_samples(case.record):
        return no_data_finding(OLDER_SAMPLES)
    if not lines:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    side = max(lines, key=lambda s: abs(lines[s].slope))
    line = lines[side]
    slope, explained, size = line.slope, line.explained, line.gap
    is_plausible = 1 / MAX_TEMPERATURE_RATIO < 1 + slope < MAX_TEMPERATURE_RATIO
    is_steep = is_plausible and abs(slope) > MIN_SLOPE and size > MAX_NOISE
    wrong = (
        is_steep
        and not (side == "sampler" and _is_of_raw_logprobs(case, slope))
        and explained > MIN_EXPLAINED_FRACTION
        and line.minority_fraction > MIN_MINORITY_FRACTION
        and (explained >= MIN_LATE_FIT or _is_there_at_start(case))
    )
    bent = None if wrong else _bent_line(case)
    if bent is not None:
        what = "of the gap in rows that it was not fitted to"
        return _bent_finding(case, bent, what, size)
    summary = (
        f"{side} against learner: slope {slope:+.3f} over logp "
        f"+ entropy (limit {MIN_SLOPE:g}), which "
        f"explains {max(explained, 0):.0%} of a gap of {size:.3g} nats"
    )
    alone = _explained_alone(case, explained) if side == "sampler" else explained
    return (failed_finding if wrong else passed_finding)(
        summary, slope=slope, explained=alone, gap=size
    )


def confirm_by_contexts(case: Case) -> Finding | None:
    """Confirm the cause without entropies, by tokens that were sampled after the same context."""
    record = case.record
    if record.logp_old is None or has_older_samples(record):
        return None
    line = _bent_line(case)
    if line is None:
        return None
    size = case.measure_once(compete_on_sampler_gap, record).size
    return _bent_finding(case, line, "of the differences between tokens of the same context", size)


def rule_out_by_contexts(case: Case) -> Finding | None:
    """Rule the cause out without entropies: a temperature changes differences within contexts."""
    record = case.record
    if record.logp_old is None or record.logp_sampler is None or has_older_samples(record):
        return None
    line = context_slope(collect_gap_tokens(record, "logp_sampler"))
    if line is None or abs(line.slope) >= MIN_SLOPE:
        return None
    return passed_finding(
        f"sampler against learner: slope {line.slope:+.3f} over logp (limit {MIN_SLOPE:g}) among "
        "tokens of the same context",
        slope=line.slope,
    )


def _bent_finding(case: Case, line: GapFit, what: str, size: float) -> Finding:
    return failed_finding(
        f"the sampler has {1 + line.value:.2f} times the inverse temperature (limit "
        f"1 +- {MIN_SLOPE:g}), which explains {line.explained:.0%} {what}",
        slope=line.value,
        explained=_explained_alone(case, line.explained),
        gap=size,
    )


def _bent_line(case: Case) -> GapFit | None:
    """Return the temperature if it wins the competition of explanations of the sampler's gap.

    Not for the reference: another network that is less certain leaves a bent line too.
    """
    if case.record.logp_sampler is None:
        return None
    competition = case.measure_once(compete_on_sampler_gap, case.record)
    if not competition.is_won_by(GapModel.TEMPERATURE) or competition.size <= MAX_NOISE:
        return None
    line = competition.winner
    if line is None or _is_of_raw_logprobs(case, line.value):
        return None
    return line if line.explained >= MIN_LATE_FIT or _is_there_at_start(case) else None


def _explained_alone(case: Case, explained: float) -> float:
    """Return what a temperature explains of the sampler's gap beyond other explanations."""
    competition = case.measure_once(compete_on_sampler_gap, case.record)
    return competition.beyond_others(GapModel.TEMPERATURE, explained)


def _is_of_raw_logprobs(case: Case, slope: float) -> bool:
    """Return whether a line is that of log-probs declared as those before the temperature."""
    temperature = (case.run.get("sampling") or {}).get("temperature")
    if case.run.get("logprob_mode") != "raw" or temperature is None:
        return False
    expected = float(temperature) - 1
    return abs(slope - expected) <= max(MIN_SLOPE, MAX_SLOPE_ERROR * abs(expected))


def _is_there_at_start(case: Case) -> bool:
    """Return whether the first step has the gap too: a policy that sharpens leaves a line."""
    start = case.start
    if case.learner_version in (0, None) or start is None or start.logp_sampler is None:
        return True
    current = rms_logp_gap(case.record, "logp_sampler", "logp_old")
    return rms_logp_gap(start, "logp_sampler", "logp_old") >= MIN_START_GAP * current


@dataclass(frozen=True, slots=True, kw_only=True)
class GapLine:
    """A line fitted to the gap over logp + entropy."""

    slope: float
    explained: float
    """Fraction that it explains: of the squared gap, or of the variance of the column if that is
    less. A slope of -1 explains the gap to a column that has nothing to do with the learner's."""
    gap: float
    """Root mean square."""
    minority_fraction: float
    """Fraction of the tokens on the side of 0 with fewer tokens, without rounding."""


def fit_gap_line(case: Case, name: str) -> GapLine | None:
    """Fit a line to the gap between a column and the learner's log-probs; None if too few."""
    record = case.record
    mask = finite_trained_tokens(record, "logp_old", name, "entropy")
    if np.count_nonzero(mask) < MIN_TOKENS:
        return None
    gap = column_difference(record, name, "logp_old")[mask]
    surprise = (float64_column(record, "logp_old") + float64_column(record, "entropy"))[mask]
    kept_indices = np.argsort(np.abs(gap))[: max(1, round((1 - TRIMMED_FRACTION) * gap.size))]
    gap, surprise = gap[kept_indices], surprise[kept_indices]
    size = float(np.sqrt(mean(gap**2)))
    along = float(np.sum(surprise**2))
    if size == 0 or along == 0:
        return GapLine(slope=0.0, explained=0.0, gap=size, minority_fraction=0.0)
    intercept = min(_intercept(gap, surprise), 0.0)
    slope = float(np.sum((gap - intercept) * surprise)) / along
    residual = float(np.sum((gap - intercept - slope * surprise) ** 2))
    unrelated = float(np.var(gap + surprise)) * gap.size
    return GapLine(
        slope=slope,
        explained=1 - residual / max(min(float(np.sum(gap**2)), unrelated), np.finfo(float).tiny),
        gap=size,
        minority_fraction=min(fraction_true(gap > ROUNDING), fraction_true(gap < -ROUNDING)),
    )


def _intercept(gap: np.ndarray, surprise: np.ndarray) -> float:
    """Return the intercept of the least-squares line."""
    spread = float(np.var(surprise))
    if not spread:
        return 0.0
    height, along = mean(gap), mean(surprise)
    tilt = mean((gap - height) * (surprise - along)) / spread
    return height - tilt * along


CHECK = Check(
    name="temperature-on-one-side",
    description="the temperature divides the logits of one side only",
    stage=Stage.SAMPLER,
    needs=("record.logp_old", "record.entropy"),
    fix="Divide the logits by the same temperature for every log-prob: sampler (processed "
    "log-probs), learner, reference; set it in one place (TRL: temperature, not "
    "generation_kwargs). Never divide log-probs.",
    judge=judge_case,
    optional_needs=("record.logp_sampler",),
    rule_out=rule_out_by_contexts,
    confirm=confirm_by_contexts,
    explains=(
        "wrong-reference",
        "imprecise-logp",
        "hidden-sampling-transform",
        "step-too-big",
        "equal-rewards",
        "unexplained-gap",
        "stale-sampler",  # a temperature that changes in the middle of a run
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_ref",
        "record.token_ids",
        "record.prompt_ids",
        "record.prompt_offsets",
        "run.sampling",
        "run.logprob_mode",
        "run.sampler",
        "probes.sampler_sync",
    ),
)
