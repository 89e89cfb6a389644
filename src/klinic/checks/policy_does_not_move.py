"""policy-does-not-move: the gradient is cut off, or the update is rounded away."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.evidence.record import StepRecord

UNCHANGED = 0.9  # of the trained weights: those of tokens that never occur stay, and are fewer


def judge(case: Case) -> Finding:
    """Flag updates that leave the weights as they were.

    Looks for
        A gradient of exactly 0 though advantages are not; weights that have the same fingerprint
        before and after an update; and the share of the weights that an update left bit for bit.
    Why it matters
        A frozen adapter, a checkpointed layer without its graph, an update below the rounding of
        bf16: rewards are healthy, the loss is alive, and nothing is ever learnt.
    Confirmed when
        Advantages are not 0 and the gradient is; or the weights are the same after an update; or
        nine of ten did not change.
    Ruled out when
        The weights change.
    Confused with
        equal-rewards (advantages are 0, so there is nothing to do); moved-reference (weights
        change, and the reference with them).
    """
    record = case.record
    if not _should_move(case, record):
        return no_data("all advantages are 0, or their warm-up is, so nothing should move")
    grad_norm = record.facts.get("grad_norm")
    if grad_norm == 0:
        return failed("advantages are not 0, and the gradient is (limit: above 0)", grad_norm=0.0)
    share = record.facts.get("unchanged_share")
    if share is not None and float(share) > UNCHANGED:
        return failed(
            f"the update left {float(share):.1%} of the weights as they were (limit "
            f"{UNCHANGED:.0%})",
            unchanged=float(share),
        )
    return _between_steps(case)


def _should_move(case: Case, record: StepRecord) -> bool:
    """Whether a step has an advantage that reaches the loss."""
    warming = case.metrics.get(record.step, {}).get("reward_scale") == 0
    return record.advantage is not None and bool(record.advantage.any()) and not warming


def _between_steps(case: Case) -> Finding:
    """Compare the weights before this step with those before the last one."""
    last = case.earlier[-1] if case.earlier else None
    if last is None or last.step != case.record.step - 1 or not _should_move(case, last):
        return no_data("no step before it whose update could be seen")
    discarded = case.metrics.get(last.step, {}).get("discarded")
    rate = last.facts.get("learning_rate")
    if discarded or rate in (None, 0):
        return no_data("the step before made no update")
    then, now = (r.facts.get("weights_published") for r in (last, case.record))
    if then is None or now is None:
        return no_data("no fingerprints of the weights")
    if then == now:
        return failed(f"an update at a rate of {rate:g} left the weights at {str(now)[:8]}")
    return passed(f"the weights went from {str(then)[:8]} to {str(now)[:8]}")


CHECK = Check(
    name="policy-does-not-move",
    stage=Stage.WIRING,
    needs=("record.advantage", "facts.grad_norm"),
    fix="Keep trained weights in fp32, let inputs require gradients where layers are "
    "checkpointed (non-reentrant), and look at which parameters are trained.",
    judge=judge,
)
