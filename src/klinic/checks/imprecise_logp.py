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
from klinic.checks.gap_models import compete_on_sampler_gap
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
MAX_ROUNDING = 1.0  # nats, mean: no number format in use rounds a log-prob by so much
MAX_BIAS_RATIO = 0.5  # max ratio of mean to mean absolute gap: noise goes both ways
MIN_ROW_FRACTION = 0.7  # min fraction of affected rows: rounding affects all
MAX_LINE_FRACTION = 0.5  # max fraction of the gap explained by a line over logp + entropy
MIN_TOKENS = 50  # tokens
MIN_DIFFERENCE = 1e-3  # nats: k3 of it is 5e-7, which fp32 keeps and bf16 rounds to 0
MIN_DIFFERENT_FRACTION = 0.01  # of the trained tokens
BF16_BITS = 0xFFFF  # the bits of a float32 that a bfloat16 has not


def judge_case(case: Case) -> Finding:
    """Flag log-probs of sampler and learner that differ by noise from the first step on.

    Looks for
        A gap that goes both ways, occurs in every row, exists before the first update, and has
        no structure: no shift, no line, no cache. And a KL that the trainer logs as exactly 0
        while policy and reference differ, in log-probs that are all numbers of bf16.
    Why it matters
        Ratios are not 1 before any update, clipping triggers on rounding, and a slow drift of
        entropy and KL ends in a collapse that no curve announces. In bf16, k3 of small
        differences is 0: the KL that is watched shows no drift at all.
    Confirmed when
        The mean absolute gap is above 0.05 nats and below 1, its mean below half of that, in 7
        of 10 rows, and no explanation of the gap wins. Or the logged KL is exactly 0, all
        log-probs of policy and reference are numbers of bf16, and 1% of the trained tokens
        differ by more than 0.001 nats.
    Ruled out when
        The gap is smaller (bf16 against fp32 is 0.01 to 0.03), or has a structure.
    Confused with
        temperature-on-one-side (a line); misaligned-logp (a shift removes it); stale-sampler
        (not before the first update); layout-changes-logp (rows scored alone agree).
    """
    if (rounded := confirm_rounded_kl(case)) is not None:
        return rounded
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
        MAX_MEAN_GAP < size < MAX_ROUNDING
        and abs(shift) < MAX_BIAS_RATIO * size
        and row_fraction > MIN_ROW_FRACTION
    )
    is_unstructured = case.measure_once(compete_on_sampler_gap, start).winner is None
    wrong = noisy and is_unstructured and _line_fraction(start) < MAX_LINE_FRACTION
    summary = (
        f"sampler and learner differ by {size:.3g} nats before the first update (limit "
        f"{MAX_MEAN_GAP:g}), {shift:+.3g} in the mean, in {row_fraction:.0%} of the rows"
    )
    return (failed_finding if wrong else passed_finding)(
        summary, gap=size, mean=shift, rows=row_fraction
    )


def confirm_rounded_kl(case: Case) -> Finding | None:
    """Fail if bf16 rounds the KL of a policy that differs from its reference to 0."""
    record = case.record
    if record.facts.get("kl_logged") != 0 or record.logp_old is None or record.logp_ref is None:
        return None
    trained = finite_trained_tokens(record, "logp_old", "logp_ref")
    if np.count_nonzero(trained) < MIN_TOKENS:
        return None
    difference = np.abs(column_difference(record, "logp_old", "logp_ref")[trained])
    fraction = fraction_true(difference > MIN_DIFFERENCE)
    rounded = all(_is_bf16(values[trained]) for values in (record.logp_old, record.logp_ref))
    if fraction <= MIN_DIFFERENT_FRACTION or not rounded:
        return None
    return failed_finding(
        f"the trainer logged a KL of exactly 0, and {fraction:.0%} of the tokens differ between "
        f"policy and reference, by up to {difference.max():.3g} nats (limit "
        f"{MIN_DIFFERENT_FRACTION:.0%}): all log-probs are rounded to bf16, where the KL of such "
        "differences is 0",
        different=fraction,
    )


def _is_bf16(values: np.ndarray) -> bool:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return not bool((bits & BF16_BITS).any())


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
    confirm=confirm_rounded_kl,
    explains=("unexplained-gap",),
    reads=(
        "record.logp_ref",
        "facts.kl_logged",
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
