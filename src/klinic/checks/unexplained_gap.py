"""unexplained-gap: sampler and learner differ, and no known cause explains how."""

from collections.abc import Mapping

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.gap_models import GapCompetition, compete_on_sampler_gap
from klinic.checks.gap_tokens import collect_gap_tokens
from klinic.checks.measures import (
    OLDER_SAMPLES,
    fraction_true,
    has_older_samples,
    logp_gap,
    mean,
    rms,
    rms_logp_gap,
    row_logp_gaps,
)
from klinic.evidence.record import StepRecord

MAX_MEAN_GAP = 0.05  # nats, mean: bf16 against fp32 is 0.01 to 0.03
MAX_MEAN_GAP_FP32 = 0.01  # nats, mean: kernels of two engines in fp32 or TF32 differ by 1e-3
LARGE_ROW_GAP = 0.3  # nats, mean of a row: ten times that of bf16 against fp32
MIN_ROW_FRACTION = 0.1  # fraction of rows with such a gap
MAX_BIAS_RATIO = 0.5  # max ratio of mean to mean absolute gap: noise goes both ways
MAX_ROUNDING = 1.0  # nats, mean: no number format in use rounds a log-prob by so much
MIN_NOISY_FRACTION = 0.7  # min fraction of affected rows: rounding affects all
MIN_GAP_GROWTH = 5.0  # times the gap of the first step: old weights, which need an update
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag a gap between sampler and learner that fits the form of no known cause.

    Looks for
        A gap above rounding, and the explanation that wins on it: temperature, truncation,
        penalty, shifted log-probs, logits or ids, cache, experts, layout, position, tokens
        encoded again, rounding, old weights.
    Why it matters
        Every ratio is wrong from the first step, whatever the reason. A gap that fits no list of
        causes is evidence of a cause that is not on the list.
    Confirmed when
        The mean gap is above 0.05 nats (0.01 if both sides compute in fp32), or a tenth of the
        rows are 0.3 nats apart, and no explanation covers most of the squared gap.
    Ruled out when
        The gap is smaller, an explanation wins, the tokens are those of older weights, or the
        gap appeared with the first update.
    Confused with
        imprecise-logp (goes both ways in every row, below 1 nat); stale-sampler (no gap before
        the first update); prompt-mismatch (the sampler received other ids).
    """
    record = case.record
    if has_older_samples(record):
        return passed_finding(OLDER_SAMPLES)
    gap = logp_gap(record, "logp_sampler", "logp_old")
    if gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    size, limit = mean(np.abs(gap)), _limit(case)
    row_fraction = _row_fraction(record, LARGE_ROW_GAP)
    summary = (
        f"sampler and learner differ by {size:.3g} nats in the mean (limit {limit:g}), and "
        f"{row_fraction:.0%} of the rows by more than {LARGE_ROW_GAP:g} "
        f"(limit {MIN_ROW_FRACTION:.0%})"
    )
    figures = {"gap": size, "rows": row_fraction}
    if size <= limit and row_fraction <= MIN_ROW_FRACTION:
        return passed_finding(summary, **figures)
    competition = case.measure_once(compete_on_sampler_gap, record)
    if (explanation := _explanation(case, competition, limit)) is not None:
        return passed_finding(f"{summary}; {explanation}", **figures)
    return failed_finding(
        f"{summary}; {_best_attempt(competition)}; {_shape(case)}",
        **figures,
        covered=competition.fits[0].explained if competition.fits else 0.0,
    )


def _limit(case: Case) -> float:
    sides = (case.run.get("policy"), case.run.get("sampler"))
    dtypes = [side.get("dtype") for side in sides if isinstance(side, Mapping)]
    is_fp32 = len(dtypes) == 2 and all(dtype == "fp32" for dtype in dtypes)
    return MAX_MEAN_GAP_FP32 if is_fp32 else MAX_MEAN_GAP


def _row_fraction(record: StepRecord, limit: float) -> float:
    means = row_logp_gaps(record, "logp_sampler", "logp_old")
    means = means[np.isfinite(means)]
    return fraction_true(means > limit) if means.size else 0.0


def _explanation(case: Case, competition: GapCompetition, limit: float) -> str | None:
    """Return what explains the gap; None for nothing."""
    if (winner := competition.winner) is not None:
        return f"{winner.model} explain {winner.explained:.0%} of it"
    gap = logp_gap(case.record, "logp_sampler", "logp_old")
    size = mean(np.abs(gap))
    goes_both_ways = abs(mean(gap)) < MAX_BIAS_RATIO * size
    everywhere = _row_fraction(case.record, size / 5) > MIN_NOISY_FRACTION
    if goes_both_ways and everywhere and size < MAX_ROUNDING:
        return "it goes both ways in every row, as rounding does"
    start = case.start
    if case.learner_version == 0 or start is None or start.logp_sampler is None:
        return None
    start_gap = rms_logp_gap(start, "logp_sampler", "logp_old")
    if start_gap < limit and competition.size > MIN_GAP_GROWTH * start_gap:
        return f"it was {start_gap:.2g} in the first step, as with old weights"
    return None


def _best_attempt(competition: GapCompetition) -> str:
    if not competition.fits or not competition.fits[0].explained:
        return "no explanation applies"
    best = competition.fits[0]
    return f"the best explanation, {best.model}, covers {best.explained:.0%} of it"


def _shape(case: Case) -> str:
    """Return where the gap is: by position, row and token, and in the first step."""
    record = case.record
    tokens = collect_gap_tokens(record, "logp_sampler")
    half = max(1, int(np.median(tokens.position)))
    early, late = tokens.gap[tokens.position < half], tokens.gap[tokens.position >= half]
    energy = np.sort(tokens.gap**2)[::-1].cumsum()
    num_heavy = int(np.searchsorted(energy, 0.9 * energy[-1])) + 1
    means = tokens.row_gaps[np.isfinite(tokens.row_gaps)]
    text = (
        f"its shape: {rms(early):.2g} before position {half} and {rms(late):.2g} after it, "
        f"{fraction_true(means > mean(means) / 5):.0%} of the rows, {num_heavy / energy.size:.0%} "
        f"of the tokens hold 90% of it, {mean(tokens.gap):+.2g} in the mean"
    )
    start = case.start
    if start is None or start is record or start.logp_sampler is None:
        return text
    return f"{text}, {rms_logp_gap(start, 'logp_sampler', 'logp_old'):.2g} in the first step"


CHECK = Check(
    name="unexplained-gap",
    description="sampler and learner differ, and no known cause explains how",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old"),
    fix="Find the first token of a row at which sampler and learner differ, and compare its inputs "
    "on both sides: ids, positions, attention mask, weights (by tensor), temperature and logits "
    "processors, dtype.",
    judge=judge_case,
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.entropy",
        "record.token_ids",
        "record.prompt_ids",
        "record.prompt_offsets",
        "record.cached_tokens",
        "record.round_trip",
        "record.prompt_ids_match",
        "record.routing_mismatch",
        "record.weight_version",
        "facts.learner_version",
        "run.policy",
        "run.sampler",
    ),
)
