"""ratio-not-applied: the importance ratio is not taken to the policy that sampled."""

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
from klinic.checks.loss_models import LOSS_FIELDS, ON_POLICY, identify_loss
from klinic.checks.measures import finite_trained_tokens, float64_column, rms, rms_logp_gap
from klinic.checks.repeated_rows import repeated_difference
from klinic.evidence.record import StepRecord

MIN_MOVEMENT = 1e-3  # nats: bf16 kernels of other shapes leave less in their mean over tokens
MIN_RATIO_FRACTION = 0.1  # of the movement: the first update has the old log-probs as its own
MIN_REPEATED = 0.8  # of the tokens: rows of a generation that earlier updates trained on
MAX_OTHER_FRACTION = 0.2  # of the distance to `logp_old`: kernels of another shape leave less


def judge_case(case: Case) -> Finding:
    """Flag importance ratios to another policy than the one that sampled.

    Looks for
        Completions that an earlier step trained on, in any order. The log-probs of both steps
        show how far the policy has moved since, and the old log-probs of this step how far the
        loss takes it to have moved. In the first update on a generation, old log-probs that are
        the reference's. And whether the recorded loss has the ratio to the recorded old log-probs.
    Why it matters
        Several updates on a generation rely on the ratio: it weights each token, and its clip
        range ends the updates of a token that has moved enough. With a ratio of 1 nothing is
        clipped, and every further update goes on as if the samples were new. With a ratio to the
        reference, tokens are clipped that have not moved, more of them with every step.
    Confirmed when
        The policy moved by more than 0.001 nats since the first update on the same completions,
        and the distance to the old log-probs is below a tenth of that; or the policy and its
        sampler agree, and the old log-probs are five times as far from both as from the
        reference; or the loss of the recent steps, within rounding, is that of a ratio of 1, and
        of no ratio to the old log-probs, from which the policy is 0.02 nats away.
    Ruled out when
        The old log-probs are those of the policy that sampled, or every generation is trained
        on once.
    Confused with
        stale-sampler (the sampler has other weights than it reports); policy-does-not-move
        (the ratio is 1 because nothing moved).
    """
    if (fault := _judge_reference(case) or _judge_loss(case)) is not None:
        return fault
    if (moved := _movement(case)) is None:
        if _trains_once(case):
            return passed_finding("no step trains on older completions, so its ratio is 1")
        return no_data_finding("no recent step trained on the same completions")
    since, movement = moved
    ratio = _logp_distance(case.record, case.record, "logp_old")
    summary = (
        f"since {since} the policy moved by {movement:.3g} nats on these completions, "
        f"and the ratio takes it to be {ratio:.3g} (limit {MIN_RATIO_FRACTION:g} of it)"
    )
    if movement <= MIN_MOVEMENT:
        return no_data_finding(f"{summary}: at least {MIN_MOVEMENT:g} nats needed")
    is_fault = ratio < MIN_RATIO_FRACTION * movement
    return (failed_finding if is_fault else passed_finding)(summary, movement=movement, ratio=ratio)


def _judge_reference(case: Case) -> Finding | None:
    """Return a finding if the old log-probs are the reference's and not the policy's."""
    record = case.record
    if record.logp_sampler is None or record.logp_ref is None:
        return None
    to_policy = rms_logp_gap(record, "logp_old", "logp")
    to_sampler = rms_logp_gap(record, "logp_old", "logp_sampler")
    to_reference = rms_logp_gap(record, "logp_old", "logp_ref")
    limit = MAX_OTHER_FRACTION * min(to_policy, to_sampler)
    agree = rms_logp_gap(record, "logp_sampler", "logp") < limit
    if limit <= MAX_OTHER_FRACTION * MIN_MOVEMENT or not agree or to_reference > limit:
        return None
    return failed_finding(
        f"`logp_old` is {to_policy:.3g} nats from `logp` and {to_sampler:.3g} from the sampler's, "
        f"which agree, and {to_reference:.3g} from the reference's (limit a fifth): the ratio is "
        "taken to the reference",
        ratio=to_policy,
    )


def _judge_loss(case: Case) -> Finding | None:
    """Return a finding if the loss is that of a ratio of 1, and the policy has moved since."""
    distance = _logp_distance(case.record, case.record, "logp_old")
    if distance <= ON_POLICY or _trains_once(case):
        return None
    fit = identify_loss(case)
    if fit is None or not fit.ratio_is_1:
        return None
    return failed_finding(
        f"{fit.sentence}: the loss does not use `logp_old`, which is {distance:.3g} nats from "
        "`logp` in this step",
        movement=distance,
    )


def _trains_once(case: Case) -> bool:
    """Return whether the run trains on every generation once, with weights that sampled it."""
    declares_none = (case.run.get("sampler") or {}).get("max_version_lag") == 0
    num_updates = case.run.get("updates_per_generation") or 1
    return declares_none and num_updates == 1 and not case.record.facts.get("updates_on_generation")


def _first_update(case: Case) -> StepRecord | None:
    """Return the first recent record of the same generation, with its rows in the same order.

    A policy that always writes the same has equal tokens in different generations: the weights that
    sampled distinguish them.
    """
    now = case.record
    for record in case.earlier:
        if (
            record.num_tokens == now.num_tokens
            and record.logp is not None
            and np.array_equal(record.row_offsets, now.row_offsets)
            and np.array_equal(record.token_ids, now.token_ids)
            and record.weight_version is not None
            and np.array_equal(record.weight_version, np.asarray(now.weight_version))
        ):
            return record
    return None


def _movement(case: Case) -> tuple[str, float] | None:
    """Return how far logp moved since the first update on these rows, and which that was."""
    now = case.record
    if (first := _first_update(case)) is not None:
        return f"step {first.step}", _logp_distance(now, first, "logp")
    versions = np.unique(np.asarray(now.weight_version))
    of_generation = [
        r
        for r in case.earlier
        if r.weight_version is not None and np.array_equal(np.unique(r.weight_version), versions)
    ]
    moved = repeated_difference(now, of_generation, "logp")  # rows may be shuffled
    if moved.size < MIN_REPEATED * now.num_tokens or not moved.size:
        return None
    return "their first update", rms(moved)


def _logp_distance(record: StepRecord, other: StepRecord, column: str) -> float:
    """Return the root mean square distance of `logp` from a column of a record."""
    mask = finite_trained_tokens(record, "logp") & finite_trained_tokens(other, column)
    return rms((float64_column(record, "logp") - float64_column(other, column))[mask])


CHECK = Check(
    name="ratio-not-applied",
    description="the importance ratio is not taken to the policy that sampled",
    stage=Stage.WIRING,
    needs=("record.logp", "record.logp_old", "record.weight_version"),
    fix="Pass the log-probs at generation time to every update on it, as the denominator of the "
    "ratio; or train on every generation once.",
    judge=judge_case,
    explains=(
        *("step-too-big", "equal-rewards", "policy-gradient-wrong", "stale-sampler"),
        "unexplained-gap",
    ),
    reads=(
        "record.prompt_ids",
        "record.prompt_offsets",
        "record.token_ids",
        "facts.learner_version",
        "facts.updates_on_generation",
        "run.updates_per_generation",
        "metrics.clip_ratio",
        "run.sampler",
        "facts.kl_coef",
        "run.estimator",
        *(name for name in LOSS_FIELDS if name not in {"record.logp", "record.logp_old"}),
    ),
)
