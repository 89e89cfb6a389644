"""moved-reference: the reference follows the policy, or is the policy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

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
from klinic.checks.reference_distance import (
    MAX_EQUAL_GAP,
    NUM_STEPS,
    find_vanished_distance,
    has_other_weights,
)
from klinic.checks.repeated_rows import repeated_difference
from klinic.evidence.record import StepRecord

MIN_TOKENS = 20  # tokens: bit-identical log-probs on all of them are then no coincidence
MAX_CHANGE = 0.05  # nats, root mean square: bf16 kernels of other shapes leave less
MIN_KEPT = 0.5  # of a reference that is updated in every step: with less it is the policy's shadow

MAX_FIRST_UPDATE_ERROR = 0.02  # of the first update: rows of unused tokens have no gradient
MAX_LATER_UPDATE = 0.8  # of it: gradients of two batches differ


def judge_case(case: Case) -> Finding:
    """Flag a reference that does not stay fixed.

    Looks for
        A changed fingerprint of the reference, its log-probs of completions that come again, a
        policy that has been updated and yet agrees with its reference bit for bit on every
        token, and a distance of the two that vanishes from one step to the next. Of a reference
        that is updated on purpose: how much of it an update keeps.
    Why it matters
        The KL drops to 0 after a restart, or is always 0: nothing ties the policy to its start,
        and every curve looks healthy.
    Confirmed when
        The fingerprint is not that of the first step; or the reference's log-probs of the same
        completions differ from the first ones by 0.05 nats; or the policy's weights have changed
        and no trained token differs by a single bit; or their distance vanishes in a step, and
        the policy's weights are not those of the start. And the recipe does not update the
        reference; or it does in every step and keeps less than half of it, with a coefficient
        above 0. If no reference is declared: their distance vanishes in the step in which Adam
        makes its first update again, which moves all weights by the learning rate.
    Ruled out when
        The reference is that of the first step, and the policy differs from it; or the recipe
        updates it slowly.
    Confused with
        policy-does-not-move (the policy's own weights have not changed); state-lost (the policy
        is back at its start).
    """
    reference = case.run["reference"]
    if reference.get("sync_every") or reference.get("ema"):
        return _judge_update(case, reference)
    if case.learner_version == 0 or case.start is None:
        return no_data_finding("a step before the first update and one after it are needed")
    if fault := _change_of_reference(case, case.start) or _return_to_policy(case):
        return fault
    if not has_other_weights(case):
        return no_data_finding("the policy has not moved, so a KL of 0 is expected")
    abs_gap = np.abs(logp_gap(case.record, "logp_old", "logp_ref"))
    if abs_gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    largest = float(abs_gap.max())
    summary = (
        f"after {count_updates(case.learner_version)} the largest "
        "difference between policy and reference is "
        f"{largest:.3g} nats (limit: above 0)"
    )
    return (failed_finding if largest == 0 else passed_finding)(summary, largest=largest)


def _judge_update(case: Case, reference: Mapping[str, Any]) -> Finding:
    """Judge a declared update: a reference that is made of the last policy ties it to nothing."""
    every, kept = reference.get("sync_every") or 1, float(reference.get("ema") or 0.0)
    if every > 1 or kept >= MIN_KEPT or not case.record.facts.get("kl_coef"):
        return passed_finding("the recipe updates the reference")
    return failed_finding(
        f"the settings update the reference in every step and keep {kept:.0%} of it (limit "
        f"{MIN_KEPT:.0%}): the KL is measured against the policy of the step before",
        kept=kept,
    )


def confirm_at_restart(case: Case) -> Finding | None:
    """Confirm the cause where no reference is declared, and it may be renewed on purpose.

    Adam's first update moves every weight by the learning rate, whatever the gradient; later ones
    average over steps and are shorter. A reference that is renewed on purpose does not restart it.
    """
    fault = None if case.run.get("reference") else _return_to_policy(case)
    if fault is None or (rates := _update_rates(case)) is None:
        return None
    first, *before, now = rates
    is_first = abs(now - first) <= MAX_FIRST_UPDATE_ERROR * first
    if not is_first or max(before) > MAX_LATER_UPDATE * first:
        return None
    return replace(
        fault,
        summary=f"{fault.summary}; and the update is {now:.4g} times the learning rate, as the "
        f"first one was ({first:.4g}, limit +- {MAX_FIRST_UPDATE_ERROR:.0%}) and none since "
        f"({max(before):.4g}, limit {MAX_LATER_UPDATE:.0%} of it): the optimizer started again "
        "in the same step, as a resume makes it",
    )


def _update_rates(case: Case) -> list[float] | None:
    """Return update norm by learning rate of the first step, of recent ones and of this one."""
    if case.start is None:
        return None
    steps = range(case.start.step + 1, case.record.step)
    before = [record for record in case.earlier if record.step in steps]
    rates = [_update_rate(record) for record in (case.start, *before, case.record)]
    known = [rate for rate in rates if rate is not None]
    return known if len(known) == len(rates) > NUM_STEPS + 1 else None


def _update_rate(record: StepRecord) -> float | None:
    norm, rate = (record.facts.get(name) for name in ("update_norm", "learning_rate"))
    if not isinstance(norm, int | float) or not isinstance(rate, int | float) or rate <= 0:
        return None
    return float(norm) / float(rate) if np.isfinite(norm) else None


def _return_to_policy(case: Case) -> Finding | None:
    """Return a finding if their distance vanished in this step by no return to the start."""
    vanished = find_vanished_distance(case)
    if vanished is None or not vanished.is_equal or not has_other_weights(case):
        return None
    return failed_finding(
        f"policy and reference were {vanished.before:.3g} nats or more apart for {NUM_STEPS} steps "
        f"and are {vanished.now:.3g} apart in this one (limit {MAX_EQUAL_GAP:g}), and the policy's "
        "weights are not those of the start: the reference was made anew from the policy",
        before=vanished.before,
        now=vanished.now,
    )


def _change_of_reference(case: Case, start: StepRecord) -> Finding | None:
    """Return a finding if the reference is not that of the first step."""
    then, now = (r.facts.get("reference_fingerprint") for r in (start, case.record))
    if then is not None and now is not None and then != now:
        return failed_finding(
            f"the reference was {str(then)[:8]} and is {str(now)[:8]} (limit: the same)"
        )
    change = repeated_difference(case.record, (start, *case.earlier), "logp_ref")
    if change.size >= MIN_TOKENS and rms(change) > MAX_CHANGE:
        return failed_finding(
            f"on {change.size} tokens that came before, the reference's log-probs have changed by "
            f"{rms(change):.3g} nats (limit {MAX_CHANGE:g})",
            change=rms(change),
        )
    return None


CHECK = Check(
    name="moved-reference",
    description="the reference follows the policy, or is the policy",
    stage=Stage.REFERENCE,
    needs=("record.logp_old", "record.logp_ref", "facts.learner_version", "run.reference"),
    fix="Copy the reference weights instead of sharing them, store their digest with every "
    "checkpoint, and load them before the policy when resuming.",
    judge=judge_case,
    confirm=confirm_at_restart,
    optional_needs=("facts.weights_published",),
    reads=(
        "facts.update_norm",
        "facts.learning_rate",
        "record.loss_mask",
        "record.row_offsets",
        "record.token_ids",
        "record.prompt_ids",
        "record.prompt_offsets",
        "facts.reference_digest",
        "facts.reference_fingerprint",
        "facts.reference_step",
        "facts.kl_coef",
    ),
)
