"""hidden-sampling-transform: the sampler truncates or penalises, the learner does not."""

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
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap
from klinic.checks.gap_tokens import declared_transforms, repeated_tokens
from klinic.checks.measures import (
    OLDER_SAMPLES,
    column_difference,
    finite_trained_tokens,
    float64_column,
    fraction_true,
    has_older_samples,
    logp_gap,
    mean,
    rms,
    rms_logp_gap,
    row_numbers,
)
from klinic.evidence.record import StepRecord
from klinic.maths.arrays import segment_sum

TOLERANCE = 1e-4  # nats: rounding of fp32 engines
MIN_RAISED_FRACTION = 0.05  # min fraction of raised tokens
MIN_RAISED_RATIO = 20.0  # times as many tokens raised as lowered
MIN_MEAN_LIFT = 2e-3  # nats, mean increase
MAX_QUIET_GAP = 0.02  # nats: below it, the reported log-probs equal the learner's
MAX_ENTROPY_DEFICIT = 0.15  # fraction of the entropy that the surprise must be below it
MIN_STANDARD_ERRORS = 8.0  # standard errors over groups, since completions of one prompt correlate
MIN_GROUPS = 24  # groups
MIN_TOTAL_ENTROPY = 200.0  # total entropy: with less, an absent rare token is no evidence
MAX_LOWERED_REPEATED = (
    0.15  # fraction of repeated tokens: a penalty lowers them and raises the rest
)
MAX_LOWERED_OTHERS = 0.02  # fraction of the other tokens, which no penalty lowers
MIN_TOKENS_PER_KIND = 20  # repeated tokens, and others
MAX_ROUNDING = 0.05  # nats, added to the bound of a declared top-p: bf16 against fp32
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag tokens that were sampled from a narrower distribution than the recipe states.

    Looks for
        Sampler log-probs above those of the learner: where outcomes are cut off, the remaining
        ones are raised, all by the same amount at a position and never lowered. If the sampler
        reports unprocessed log-probs, tokens that are less surprising than their entropy. And
        tokens that are lowered only if they occurred earlier in the row.
    Why it matters
        Engines silently read top-p, top-k or penalties from a config file of the model. The
        policy is then trained on tokens of another distribution than the one it is scored with.
    Confirmed when
        At least 5% of the tokens are raised and twenty times fewer lowered, they surprise the
        learner no more than its entropy, and no other explanation of the gap explains more; or
        half of the tokens are not changed at all: a token is forbidden at some positions; or,
        over many groups, their surprise is 15% below their entropy by eight standard errors; or
        tokens that occurred earlier are lowered and no others. And the recipe declares no such
        transform, or only a top-p p, and 5% of the tokens are raised by more than -log(p).
    Ruled out when
        Log-probs agree and surprise equals entropy, or the recipe declares the transform.
    Confused with
        temperature-on-one-side (tokens are raised and lowered, along a line); stale-sampler
        (not before the first update).
    """
    declared = declared_transforms(case.run.get("sampling") or {})
    if declared:
        return _judge_declared(case, declared)
    if has_older_samples(case.record):
        return no_data_finding(OLDER_SAMPLES)
    lift = logp_gap(case.record, "logp_sampler", "logp_old")
    if lift.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    raised, lowered, mean_lift = (
        fraction_true(lift > TOLERANCE),
        fraction_true(lift < -TOLERANCE),
        mean(lift),
    )
    one_sided = (
        raised > MIN_RAISED_FRACTION
        and raised > MIN_RAISED_RATIO * lowered
        and mean_lift > MIN_MEAN_LIFT
        and case.measure_once(compete_on_sampler_gap, case.record).is_won_by(
            GapModel.TRUNCATION, GapModel.SUPPRESSION
        )
    )
    lowered_repeated, lowered_fresh = _lowered_fractions(case.record)
    if lowered_repeated > MAX_LOWERED_REPEATED and lowered_fresh < MAX_LOWERED_OTHERS:
        return failed_finding(
            f"{lowered_repeated:.0%} of the tokens that occurred "
            "earlier in their row are lowered (limit "
            f"{MAX_LOWERED_REPEATED:.0%}), and {lowered_fresh:.0%} of "
            f"the others (limit {MAX_LOWERED_OTHERS:.0%}): a "
            "repetition penalty",
            seen=lowered_repeated,
            fresh=lowered_fresh,
        )
    summary = (
        f"{raised:.0%} of the tokens are raised and {lowered:.0%} "
        f"lowered, by {mean_lift:+.3g} nats "
        f"in the mean (limits {MIN_RAISED_FRACTION:.0%}, a twentieth of it, {MIN_MEAN_LIFT:g})"
    )
    measured = {"lifted": raised, "lowered": lowered, "lift": mean_lift}
    if one_sided or rms_logp_gap(case.record, "logp_sampler", "logp_old") > MAX_QUIET_GAP:
        return (failed_finding if one_sided else passed_finding)(summary, **measured)
    return _judge_surprise(case, summary, measured)


def _judge_declared(case: Case, declared: str) -> Finding:
    """Judge a declared transform: top-p alone bounds how far it raises a token."""
    sampling = case.run.get("sampling") or {}
    lift = logp_gap(case.record, "logp_sampler", "logp_old")
    top_p = sampling.get("top_p") or 1.0
    if declared != f"top_p {sampling.get('top_p')}" or lift.size < MIN_TOKENS:
        return passed_finding(f"the recipe declares it: {declared}")
    bound = -np.log(top_p) + MAX_ROUNDING
    beyond = fraction_true(lift > bound)
    won = case.measure_once(compete_on_sampler_gap, case.record).is_won_by(GapModel.TRUNCATION)
    return (failed_finding if won and beyond > MIN_RAISED_FRACTION else passed_finding)(
        f"the recipe declares {declared}, which raises no token by more than {bound:.3g} nats; "
        f"{beyond:.0%} of the tokens are raised further (limit {MIN_RAISED_FRACTION:.0%})",
        beyond=beyond,
    )


def _lowered_fractions(record: StepRecord) -> tuple[float, float]:
    """Return the fractions of lowered tokens among repeated tokens and among the others."""
    if record.prompt_ids is None or record.prompt_offsets is None:
        return 0.0, 0.0
    lift = column_difference(record, "logp_sampler", "logp_old")
    mask = finite_trained_tokens(record, "logp_sampler", "logp_old")
    if (
        np.square(lift[mask]).sum() < MIN_TOKENS_PER_KIND * MAX_QUIET_GAP**2
    ):  # too little to reach QUIET
        return 0.0, 0.0
    repeated = repeated_tokens(record)
    repeated_lift, fresh_lift = lift[mask & repeated], lift[mask & ~repeated]
    if (
        min(repeated_lift.size, fresh_lift.size) < MIN_TOKENS_PER_KIND
        or rms(repeated_lift) < MAX_QUIET_GAP
    ):
        return 0.0, 0.0
    return float((repeated_lift < -TOLERANCE).mean()), float((fresh_lift < -TOLERANCE).mean())


def _judge_surprise(case: Case, summary: str, measured: Mapping[str, float]) -> Finding:
    records = [r for r in case.recent_records if r.entropy is not None and r.logp_old is not None]
    surprises = [case.measure_once(_excess_surprise, record) for record in records]
    groups = np.concatenate([np.zeros(0), *(by_group for by_group, _ in surprises)])
    nats = sum(total for _, total in surprises)
    if len(groups) < MIN_GROUPS or nats < MIN_TOTAL_ENTROPY:
        return passed_finding(summary, **measured)
    scores = float(groups.mean() / (groups.std(ddof=1) / np.sqrt(len(groups)) + 1e-12))
    rows_per_group = sum(record.num_rows for record in records) / len(groups)
    deficit = -float(groups.sum()) / nats * rows_per_group
    wrong = scores < -MIN_STANDARD_ERRORS and deficit > MAX_ENTROPY_DEFICIT
    full_summary = (
        f"{summary}; tokens are {deficit:.1%} less surprising than their entropy (limit "
        f"{MAX_ENTROPY_DEFICIT:.0%}), by {-scores:.1f} standard "
        f"errors (limit {MIN_STANDARD_ERRORS:g})"
    )
    return (failed_finding if wrong else passed_finding)(
        full_summary, **measured, deficit=deficit, scores=scores
    )


def _excess_surprise(record: StepRecord) -> tuple[np.ndarray, float]:
    """Return surprise minus entropy (row sums, averaged in groups), and the total entropy.

    Within a row it is a sum of terms whose conditional mean is 0, so lengths do not bias it.
    """
    mask = finite_trained_tokens(record, "logp_old", "entropy")
    entropy = float64_column(record, "entropy")
    excess = np.where(mask, -float64_column(record, "logp_old") - entropy, 0.0)
    rows = segment_sum(excess, row_numbers(record), record.num_rows)
    group_ids, group = np.unique(record.group, return_inverse=True)
    means = np.bincount(group, weights=rows) / np.bincount(group)
    return means[: len(group_ids)], float(entropy[mask].sum())


CHECK = Check(
    name="hidden-sampling-transform",
    description="the sampler truncates or penalises, the learner does not",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old"),
    fix="Sample from the full distribution in training: do_sample on and no temperature of 0 "
    "(greedy), top_p 1, top_k off, no penalties, no minimum length or banned token, and no "
    "generation_kwargs or config file that sets them (vLLM: generation_config='vllm').",
    judge=judge_case,
    optional_needs=("record.entropy", "run.sampling"),
    change={"sampling.top_p": 1.0, "sampling.top_k": 0, "sampling.min_p": 0.0},
    # without variety, as after greedy sampling, the completions of a group are equal
    explains=("imprecise-logp", "broken-sampler", "unexplained-gap", "equal-rewards"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.rank",
        "record.logp_ref",
        "record.token_ids",
        "record.prompt_ids",
        "run.logprob_mode",
    ),
)
