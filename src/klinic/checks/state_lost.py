"""state-lost: weights, schedule or controller start over in the middle of a run."""

from collections.abc import Sequence

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
from klinic.checks.measures import rms
from klinic.checks.reference_distance import (
    MAX_REMAINING,
    NUM_STEPS,
    find_vanished_distance,
    has_other_weights,
)
from klinic.checks.repeated_rows import repeated_difference
from klinic.evidence.record import Fact, StepRecord

MAX_REFERENCE_CHANGE = 0.1  # of that distance, on completions that come again
MIN_SETTING_CHANGE = 0.2  # of a learning rate or coefficient since the first step
MAX_RETURN = 0.02  # of that change: the value is that of the first step again
MAX_TYPICAL_FRACTION = 0.5  # of the jump that earlier changes of a step may reach


def judge_case(case: Case) -> Finding:
    """Flag a run that is back at its start from one step to the next.

    Looks for
        The distance of policy and reference, the learning rate and the coefficient of the KL
        over the recent steps, against those of the first step.
    Why it matters
        A resume that loads no weights, no scheduler or no controller trains on from the start
        while the step counter goes on. The curve shows a dent that looks like an unlucky batch.
    Confirmed when
        The policy was above 0.01 nats from its reference for three steps and is within a tenth of
        that in the next, and the reference is the same, by its fingerprint and on completions
        that come again; or the learning rate or the coefficient
        had changed by a fifth and has its first value again, in a jump of twice any change
        before.
    Ruled out when
        None of them returns to the start within a step.
    Confused with
        moved-reference (the reference has changed, not the policy); step-too-big (the policy
        moves away, not back).
    """
    before = [r for r in case.earlier if r.step < case.record.step][-NUM_STEPS:]
    if case.start is None or len(before) < NUM_STEPS:
        return no_data_finding(f"the first step and {NUM_STEPS} earlier steps are needed")
    if (fault := _weights_fault(case, before)) is not None:
        return fault
    for name in ("learning_rate", "kl_coef"):
        if (fault := _setting_fault(name, case)) is not None:
            return fault
    return passed_finding(
        "distance to the reference, learning rate and coefficient go on from the step before"
    )


def _weights_fault(case: Case, before: Sequence[StepRecord]) -> Finding | None:
    reference = case.run.get("reference") or {}
    prints = {r.facts.get("reference_fingerprint") for r in (*before, case.record)}
    if reference.get("sync_every") or reference.get("ema") or len(prints) > 1:
        return None
    if (vanished := find_vanished_distance(case)) is None:
        return None
    change = rms(repeated_difference(case.record, case.earlier, "logp_ref"))
    is_remade = vanished.is_equal and has_other_weights(case)
    if change > MAX_REFERENCE_CHANGE * vanished.before or is_remade:  # it came to the policy
        return None
    return failed_finding(
        f"the policy was {vanished.before:.3g} nats or more from its reference for {NUM_STEPS} "
        f"steps and is {vanished.now:.3g} away in this one (limit {MAX_REMAINING:.0%} of it): its "
        "weights are those of the start",
        before=vanished.before,
        now=vanished.now,
    )


def _setting_fault(name: str, case: Case) -> Finding | None:
    assert case.start is not None  # noqa: S101 - checked by the caller
    records = [r for r in case.earlier if r.step < case.record.step]
    values = [_number(r.facts.get(name)) for r in records]
    first, now = _number(case.start.facts.get(name)), _number(case.record.facts.get(name))
    if first is None or now is None or None in values or len(values) < NUM_STEPS + 1:
        return None
    history = np.array(values, dtype=np.float64)
    change = abs(float(history[-1]) - first)
    is_back = abs(now - first) <= MAX_RETURN * change
    typical = float(np.abs(np.diff(history)).max())
    is_jump = abs(now - float(history[-1])) * MAX_TYPICAL_FRACTION > typical
    if change <= MIN_SETTING_CHANGE * max(abs(first), 1e-12) or not (is_back and is_jump):
        return None
    return failed_finding(
        f"`{name}` was {history[-1]:.3g} and is {now:.3g}, as in the first step ({first:.3g})",
        before=float(history[-1]),
        now=now,
    )


def _number(value: Fact) -> float | None:
    return float(value) if isinstance(value, int | float) else None


CHECK = Check(
    name="state-lost",
    description="weights, schedule or controller start over in the middle of a run",
    stage=Stage.WIRING,
    needs=("facts.learner_version",),
    fix="Save and restore everything that a step changes: weights, optimizer moments, learning "
    "rate schedule, KL controller, reference, position in the data; compare the first step after "
    "a resume with the same step of a run that was not stopped.",
    judge=judge_case,
    explains=("moved-reference", "policy-does-not-move"),
    reads=(
        "record.logp_old",
        "record.logp_ref",
        "record.prompt_ids",
        "record.prompt_offsets",
        "record.row_offsets",
        "record.token_ids",
        "facts.learning_rate",
        "facts.kl_coef",
        "facts.reference_fingerprint",
        "facts.weights_published",
        "run.reference",
    ),
)
