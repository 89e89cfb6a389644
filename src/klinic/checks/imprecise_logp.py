"""imprecise-logp: log-probs are rounded, or depend on the shape of the batch."""

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
from klinic.checks.measures import (
    column_difference,
    finite_trained_tokens,
    float64_column,
    fraction_true,
    logp_gap,
    mean,
    row_logp_gaps,
)
from klinic.evidence.record import StepRecord

MAX_MEAN_GAP = 0.05  # nats, mean: ratios off by 5%; engines' documentation advises to investigate
MAX_BIAS_RATIO = 0.5  # max ratio of mean to mean absolute gap: noise goes both ways
MIN_ROW_FRACTION = 0.7  # min fraction of affected rows: rounding affects all
MAX_LINE_FRACTION = 0.5  # max fraction of the gap explained by a line over logp + entropy
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag log-probs of sampler and learner that differ by noise from the first step on.

    Looks for
        A gap that goes both ways, occurs in every row, exists before the first update, and has
        no structure: no shift, no line, no cache.
    Why it matters
        Ratios are not 1 before any update, clipping triggers on rounding, and a slow drift of
        entropy and KL ends in a collapse that no curve announces.
    Confirmed when
        The mean absolute gap is above 0.05 nats, its mean below half of that, in 7 of 10 rows.
    Ruled out when
        The gap is smaller (bf16 against fp32 is 0.01 to 0.03), or has a structure.
    Confused with
        temperature-on-one-side (a line); misaligned-logp (a shift removes it); stale-sampler
        (not before the first update); layout-changes-logp (rows scored alone agree).
    """
    start = case.start if case.start is not None else case.record
    if start.facts.get("learner_version") not in (0, None) or start.logp_sampler is None:
        return no_data_finding("the step before the first update was not recorded")
    start_gap = logp_gap(start, "logp_sampler", "logp_old")
    if start_gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    size, shift = mean(np.abs(start_gap)), mean(start_gap)
    row_fraction = _affected_row_fraction(start)
    noisy = (
        size > MAX_MEAN_GAP
        and abs(shift) < MAX_BIAS_RATIO * size
        and row_fraction > MIN_ROW_FRACTION
    )
    wrong = noisy and _line_fraction(start) < MAX_LINE_FRACTION
    summary = (
        f"sampler and learner differ by {size:.3g} nats before the first update (limit "
        f"{MAX_MEAN_GAP:g}), {shift:+.3g} in the mean, in {row_fraction:.0%} of the rows"
    )
    return (failed_finding if wrong else passed_finding)(
        summary, gap=size, mean=shift, rows=row_fraction
    )


def _affected_row_fraction(record: StepRecord) -> float:
    means = row_logp_gaps(record, "logp_sampler", "logp_old")
    means = means[np.isfinite(means)]
    return fraction_true(means > MAX_MEAN_GAP / 5) if means.size else 0.0


def _line_fraction(record: StepRecord) -> float:
    """Return the fraction of the gap that a line over logp + entropy explains."""
    if record.entropy is None:
        return 0.0
    mask = finite_trained_tokens(record, "logp_sampler", "logp_old", "entropy")
    line_gap = column_difference(record, "logp_sampler", "logp_old")[mask]
    surprise = (float64_column(record, "logp_old") + float64_column(record, "entropy"))[mask]
    along, total = float(np.sum(surprise**2)), float(np.sum(line_gap**2))
    if not along or not total:
        return 0.0
    return float(np.sum(line_gap * surprise)) ** 2 / (along * total)


CHECK = Check(
    name="imprecise-logp",
    description="log-probs are rounded, or depend on the shape of the batch",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old"),
    fix="Compute head and log-softmax in fp32 on both sides, and use batch-invariant kernels; or "
    "correct with truncated importance weights.",
    judge=judge_case,
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp",
        "facts.micro_batch_size",
        "facts.scoring_batch_size",
        "run.policy",
        "run.sampler",
        "run.logp_old",
        "probes.rescore_float32",
    ),
)
