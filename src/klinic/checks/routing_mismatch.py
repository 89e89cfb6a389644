"""routing-mismatch: sampler and learner route tokens to different experts."""

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
from klinic.checks.measures import column_difference, finite_trained_tokens

MIN_MISMATCH_FRACTION = 0.05  # fraction of tokens routed differently in at least one layer
MIN_GAP_RATIO = 2.0  # times the gap of tokens routed to the same experts
MIN_TOKENS = 30  # tokens of each kind


def judge_case(case: Case) -> Finding:
    """Flag a gap on tokens that sampler and learner route to different experts.

    Looks for
        The gap between sampler and learner on tokens whose experts differ between the two, and
        on tokens whose experts are equal.
    Why it matters
        A rounding error in a router sends a token to another expert, and its log-prob is that
        of another network: mixture-of-experts runs collapse where their dense equivalent is
        healthy.
    Confirmed when
        More than 5% of the tokens have a layer that differs, their gap is twice that of the
        others, and no other explanation of the gap explains more.
    Ruled out when
        Experts are equal, or tokens whose experts differ have no larger gap.
    Confused with
        imprecise-logp (the gap exists without a difference in experts).
    """
    record = case.record
    if case.run["policy"].get("num_experts") == 0:
        return passed_finding("the model has no experts")
    if record.routing_mismatch is None:
        return no_data_finding("not recorded: `record.routing_mismatch`")
    mask = finite_trained_tokens(record, "logp_sampler", "logp_old") & np.isfinite(
        record.routing_mismatch
    )
    abs_gap = np.abs(column_difference(record, "logp_sampler", "logp_old"))
    differs = mask & (record.routing_mismatch > 0)
    same = mask & (record.routing_mismatch == 0)
    mismatch_fraction = float(differs.sum() / max(int(mask.sum()), 1))
    if mismatch_fraction <= MIN_MISMATCH_FRACTION:
        return passed_finding(
            f"{mismatch_fraction:.1%} of the tokens have experts that "
            f"differ (limit {MIN_MISMATCH_FRACTION:.0%})"
        )
    if differs.sum() < MIN_TOKENS or same.sum() < MIN_TOKENS:
        return no_data_finding(
            f"{differs.sum()} tokens with other experts, {same.sum()} with the same"
        )
    differing_gap, same_gap = float(abs_gap[differs].mean()), float(abs_gap[same].mean())
    summary = (
        f"{mismatch_fraction:.0%} of the tokens have experts that differ "
        f"(limit {MIN_MISMATCH_FRACTION:.0%}); their gap is "
        f"{differing_gap:.3g} nats, that of the others {same_gap:.3g} (limit twice)"
    )
    is_lost = case.measure_once(compete_on_sampler_gap, record).is_lost_by(GapModel.ROUTING)
    wrong = differing_gap > MIN_GAP_RATIO * same_gap and not is_lost
    return (failed_finding if wrong else passed_finding)(
        summary, share=mismatch_fraction, gap=differing_gap, others=same_gap
    )


CHECK = Check(
    name="routing-mismatch",
    description="sampler and learner route tokens to different experts",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old", "run.policy"),
    fix="Replay the sampler's experts in the learner, or use ratios of whole completions (gspo).",
    judge=judge_case,
    change={"learner.loss": "gspo"},
    explains=("imprecise-logp", "stale-sampler", "unexplained-gap"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.routing_mismatch",
    ),
    not_recorded=(
        "the experts themselves: layers times tokens of them; the share that differs decides"
    ),
)
