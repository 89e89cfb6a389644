"""policy-does-not-move: the gradient is cut off, or the update is lost to rounding."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.evidence.record import StepRecord

MAX_UNCHANGED_FRACTION = 0.9  # fraction of weights: fewer belong to tokens that never occur


def judge_case(case: Case) -> Finding:
    """Flag updates that leave the weights unchanged.

    Looks for
        A gradient of exactly 0 although advantages are not; equal fingerprints of the weights
        before and after an update; and the fraction of the weights that an update left
        bit-identical.
    Why it matters
        A frozen adapter, a checkpointed layer without its graph, an update below bf16 rounding:
        rewards and loss look healthy, and nothing is learned.
    Confirmed when
        Advantages are not 0 and the gradient is; or the weights are equal after an update; or
        nine of ten did not change.
    Ruled out when
        The weights change.
    Confused with
        equal-rewards (advantages are 0, so there is nothing to learn); moved-reference (weights
        change, and the reference with them).
    """
    record = case.record
    if not _is_update_expected(case, record):
        return no_data_finding(
            "all advantages are 0, or their warm-up factor is, so no update is expected"
        )
    grad_norm = record.facts.get("grad_norm")
    if grad_norm == 0:
        return failed_finding(
            "advantages are not 0, the gradient is 0 (limit: above 0)", grad_norm=0.0
        )
    unchanged_fraction = record.facts.get("unchanged_share")
    if unchanged_fraction is not None and float(unchanged_fraction) > MAX_UNCHANGED_FRACTION:
        return failed_finding(
            (
                f"the update left {float(unchanged_fraction):.1%} of the weights "
                f"unchanged (limit {MAX_UNCHANGED_FRACTION:.0%})"
            ),
            unchanged=float(unchanged_fraction),
        )
    return _compare_with_previous(case)


def _is_update_expected(case: Case, record: StepRecord) -> bool:
    """Return whether a step has a nonzero advantage that reaches the loss."""
    is_warming_up = case.metrics.get(record.step, {}).get("reward_scale") == 0
    return record.advantage is not None and bool(record.advantage.any()) and not is_warming_up


def _compare_with_previous(case: Case) -> Finding:
    """Compare the weights before this step with those before the previous step."""
    previous = case.earlier[-1] if case.earlier else None
    if (
        previous is None
        or previous.step != case.record.step - 1
        or not _is_update_expected(case, previous)
    ):
        return no_data_finding("no previous step whose update can be compared")
    discarded = case.metrics.get(previous.step, {}).get("discarded")
    rate = previous.facts.get("learning_rate")
    if discarded or rate in (None, 0):
        return no_data_finding("the previous step made no update")
    then, now = (r.facts.get("weights_published") for r in (previous, case.record))
    if then is None or now is None:
        return no_data_finding("no fingerprints of the weights")
    if then == now:
        return failed_finding(
            f"an update at learning rate {rate:g} left the weights at {str(now)[:8]}"
        )
    return passed_finding(f"the weights went from {str(then)[:8]} to {str(now)[:8]}")


CHECK = Check(
    name="policy-does-not-move",
    description="the gradient is cut off, or the update is lost to rounding",
    stage=Stage.WIRING,
    needs=("record.advantage", "facts.grad_norm"),
    fix="Keep trained weights in fp32, use non-reentrant checkpointing with inputs that require "
    "gradients, and verify which parameters are trainable.",
    judge=judge_case,
    reads=(
        "facts.update_norm",
        "facts.unchanged_share",
        "facts.weights_published",
        "facts.learning_rate",
        "metrics.reward_scale",
        "metrics.discarded",
        "run.policy",
    ),
)
