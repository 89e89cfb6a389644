"""policy-does-not-move: the gradient is cut off, or the update is lost to rounding."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.evidence.record import StepRecord

UNCHANGED = 0.9  # fraction of weights: fewer belong to tokens that never occur


def judge(case: Case) -> Finding:
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
    if not _should_move(case, record):
        return no_data("all advantages are 0, or their warm-up factor is, so no update is expected")
    grad_norm = record.facts.get("grad_norm")
    if grad_norm == 0:
        return failed("advantages are not 0, the gradient is 0 (limit: above 0)", grad_norm=0.0)
    share = record.facts.get("unchanged_share")
    if share is not None and float(share) > UNCHANGED:
        return failed(
            f"the update left {float(share):.1%} of the weights unchanged (limit {UNCHANGED:.0%})",
            unchanged=float(share),
        )
    return _between_steps(case)


def _should_move(case: Case, record: StepRecord) -> bool:
    """Return whether a step has a nonzero advantage that reaches the loss."""
    warming = case.metrics.get(record.step, {}).get("reward_scale") == 0
    return record.advantage is not None and bool(record.advantage.any()) and not warming


def _between_steps(case: Case) -> Finding:
    """Compare the weights before this step with those before the previous step."""
    last = case.earlier[-1] if case.earlier else None
    if last is None or last.step != case.record.step - 1 or not _should_move(case, last):
        return no_data("no previous step whose update can be compared")
    discarded = case.metrics.get(last.step, {}).get("discarded")
    rate = last.facts.get("learning_rate")
    if discarded or rate in (None, 0):
        return no_data("the previous step made no update")
    then, now = (r.facts.get("weights_published") for r in (last, case.record))
    if then is None or now is None:
        return no_data("no fingerprints of the weights")
    if then == now:
        return failed(f"an update at learning rate {rate:g} left the weights at {str(now)[:8]}")
    return passed(f"the weights went from {str(then)[:8]} to {str(now)[:8]}")


CHECK = Check(
    name="policy-does-not-move",
    stage=Stage.WIRING,
    needs=("record.advantage", "facts.grad_norm"),
    fix="Keep trained weights in fp32, use non-reentrant checkpointing with inputs that require "
    "gradients, and verify which parameters are trainable.",
    judge=judge,
)
