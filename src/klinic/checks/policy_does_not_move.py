"""policy-does-not-move: the gradient is cut off, or the update is lost to rounding."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    count_updates,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import logp_gap, rms
from klinic.evidence.record import StepRecord

MAX_UNCHANGED_FRACTION = 0.9  # fraction of weights: fewer belong to tokens that never occur
MIN_UPDATES = 8  # updates before log-probs are compared with the start: a warm-up starts slowly
MIN_SIGNALS = 3  # of them with an advantage
NUM_IDLE_STEPS = 3  # consecutive steps at a learning rate of 0: a warm-up may begin with one
END_OF_SCHEDULE = 0.95  # of the steps of the run: a schedule may end with a rate of 0
MIN_MOVEMENT = 2e-5  # nats: float32 scoring leaves 1e-6, and a rate of 1e-8 a step moves more


def judge_case(case: Case) -> Finding:
    """Flag updates that leave the weights unchanged.

    Looks for
        A gradient of exactly 0 although advantages are not; equal fingerprints of the weights
        before and after an update; the fraction of the weights that an update left
        bit-identical; the distance of the policy from its frozen start after eight updates; and
        the learning rate, its warm-up and the number of steps.
    Why it matters
        A frozen adapter, a checkpointed layer without its graph, an update below bf16 rounding,
        a warm-up that is longer than the run: rewards and loss look healthy, and nothing is
        learned.
    Confirmed when
        Advantages are not 0 and the gradient is; or the weights are equal after an update; or
        nine of ten did not change; or, after eight updates, log-probs are within 2e-5 nats of
        those of the start; or the learning rate is 0 in three steps in a row before the end of the
        run; or its warm-up is not shorter than the run.
    Ruled out when
        The weights change.
    Confused with
        equal-rewards (advantages are 0, so there is nothing to learn); moved-reference (weights
        change, and the reference with them).
    """
    record = case.record
    if fault := _schedule_fault(case):
        return failed_finding(fault)
    distance = _distance_from_start(case)
    if distance is not None and distance < MIN_MOVEMENT:
        return failed_finding(
            f"after {count_updates(case.learner_version)} the log-probs are {distance:.2g} nats "
            f"from those of the start (limit {MIN_MOVEMENT:g}), at a learning rate of "
            f"{record.facts.get('learning_rate')}",
            distance=distance,
        )
    if not _is_update_expected(case, record):
        return no_data_finding(
            "all advantages are 0, or their warm-up factor is, so no update is expected"
        )
    grad_norm = record.facts.get("grad_norm")
    if grad_norm == 0:
        return failed_finding(
            "advantages are not 0, the gradient is 0 (limit: above 0)", grad_norm=0.0
        )
    unchanged = float(record.facts.get("unchanged_share") or 0.0)
    # a warm-up may begin at a learning rate of 0
    if unchanged > MAX_UNCHANGED_FRACTION and record.facts.get("learning_rate") != 0:
        return failed_finding(
            f"the update left {unchanged:.1%} of the weights unchanged "
            f"(limit {MAX_UNCHANGED_FRACTION:.0%})",
            unchanged=unchanged,
        )
    return _compare_with_previous(case)


def _schedule_fault(case: Case) -> str:
    """Return what is wrong with the learning rate; empty for nothing."""
    max_steps, warmup = case.run.get("max_steps"), case.run.get("warmup_steps")
    if max_steps and warmup and warmup >= max_steps:
        return f"the warm-up takes {warmup} steps, and the run has {max_steps} (limit: fewer)"
    last = case.recent_records[-NUM_IDLE_STEPS:]
    is_idle = [r.facts.get("learning_rate") == 0 and bool(r.facts.get("grad_norm")) for r in last]
    is_ending = bool(max_steps) and case.record.step > END_OF_SCHEDULE * float(max_steps or 0)
    if len(last) < NUM_IDLE_STEPS or not all(is_idle) or is_ending:
        return ""
    return (
        f"the learning rate is 0 in {NUM_IDLE_STEPS} steps in a row, and the gradient is not "
        f"(limit {NUM_IDLE_STEPS - 1})"
    )


def _is_update_expected(case: Case, record: StepRecord) -> bool:
    """Return whether a step has a nonzero advantage that reaches the loss."""
    is_warming_up = case.metrics.get(record.step, {}).get("reward_scale") == 0
    return record.advantage is not None and bool(record.advantage.any()) and not is_warming_up


def _distance_from_start(case: Case) -> float | None:
    """Return the distance of the policy from a reference that is still its start, in nats.

    None before `MIN_UPDATES` updates, with too few advantages, or with another reference.
    """
    signals = [r for r in case.earlier if _is_update_expected(case, r) and _has_rate(r)]
    if (case.learner_version or 0) < MIN_UPDATES or len(signals) < MIN_SIGNALS:
        return None
    if case.start is None or case.record.logp_old is None or case.record.logp_ref is None:
        return None
    then, now = (r.facts.get("reference_fingerprint") for r in (case.start, case.record))
    gap = logp_gap(case.record, "logp_old", "logp_ref")
    return rms(gap) if gap.size and now is not None and then == now else None


def _has_rate(record: StepRecord) -> bool:
    rate = record.facts.get("learning_rate")
    return rate is not None and float(rate) > 0


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
    if then == now and (case.run.get("sampler") or {}).get("max_version_lag"):
        return no_data_finding("samplers may have weights of an earlier update, as declared")
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
    fix="Keep trained weights in fp32, check the learning rate and its warm-up, use non-reentrant "
    "checkpointing with inputs that require gradients, and verify which parameters are trainable.",
    judge=judge_case,
    reads=(
        "record.logp_old",
        "record.logp_ref",
        "facts.reference_fingerprint",
        "facts.learner_version",
        "facts.update_norm",
        "facts.unchanged_share",
        "facts.weights_published",
        "facts.learning_rate",
        "metrics.reward_scale",
        "metrics.discarded",
        "run.policy",
        "run.sampler",
        "run.max_steps",
        "run.warmup_steps",
    ),
)
