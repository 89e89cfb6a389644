"""corrupted-sync: the sampler has weights that the learner never had."""

import math
from collections.abc import Mapping

import numpy as np

from klinic.checks import sampler_sync
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
from klinic.checks.gap_models import compete_on_sampler_gap
from klinic.checks.gap_tokens import SurpriseExcess, collect_gap_tokens, surprise_excess
from klinic.checks.measures import (
    fraction_true,
    has_older_samples,
    logp_gap,
    mean,
    rms_logp_gap,
)
from klinic.evidence.record import StepRecord

MIN_MEAN_GAP = 0.3  # nats, mean: ten times that of bf16 against fp32
MIN_BIAS_RATIO = 0.3  # min ratio of mean to mean absolute gap: the mean is a KL, noise has none
MIN_ROW_FRACTION = 0.7  # min fraction of affected rows: weights affect all
MIN_ERRORS = 4.0  # standard errors of the learner's surprise above its entropy
MOST_PER_UPDATE = 0.3  # nats, mean: no update moves a policy by so much
MAX_START_GAP = 0.1  # nats, mean, in the step before the first update
MIN_PATH_RATIO = 3.0  # times the distance of policy and start: farther than any older weights
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag a sampler whose weights are neither the learner's nor older ones.

    Looks for
        The form of a gap between two networks: the sampler prefers its own tokens, so that the
        mean gap is positive (a KL), the learner is surprised above its entropy, and all rows are
        affected. Before the first update no older weights exist. Later, the distance of policy
        and reference, which is the start, shows how far older weights can be.
    Why it matters
        A sync that skips, reorders or damages tensors, misreads packed or sharded ones, or scales
        an adapter twice: completions rot while the learner is intact, and it looks like staleness.
    Confirmed when
        After a sync, fingerprints show a tensor that did not arrive, or arrived as another one or
        with another norm. Or: sampler and learner have separate weights, the mean gap is above
        0.3 nats and of that form, no explanation of the gap wins, and it exists before the first
        update or is three times the distance that the policy has moved. Without entropies or the
        sampler's settings: the gap did not exist before the first update, and is above 0.3 nats
        for every update since.
    Ruled out when
        Both use the same tensors, fingerprints agree, or the gap is smaller or of another form.
    Confused with
        stale-sampler (the sampler agrees with an older policy); prompt-mismatch (other ids);
        imprecise-logp (the gap goes both ways).
    """
    sync = sampler_sync.diagnose_sync(
        case.probe_results.get("sampler_sync"), sampler_sync.sampler_dtype(case.run)
    )
    if sync is not None and sync.cause == sampler_sync.DAMAGED:
        return failed_finding(sync.summary)
    record = case.record
    gap = logp_gap(record, "logp_sampler", "logp_old")
    if gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    size, bias = mean(np.abs(gap)), mean(gap)
    summary = (
        f"sampler and learner differ by {size:.3g} nats (limit {MIN_MEAN_GAP:g}), {bias:+.3g} in "
        f"the mean (limit {MIN_BIAS_RATIO:.0%} of it)"
    )
    if size <= MIN_MEAN_GAP or _has_same_weights(case) or not _is_between_networks(case):
        return passed_finding(summary, gap=size, mean=bias)
    if case.learner_version == 0:
        return failed_finding(f"{summary}, before the first update", gap=size, mean=bias)
    return _judge_path(case, summary)


def confirm_by_distance(case: Case) -> Finding | None:
    """Confirm the cause from log-probs alone: no older weights are as far away."""
    record, start, version = case.record, case.start, case.learner_version
    if not version or start is None or start.logp_sampler is None or start.logp_old is None:
        return None
    if record.logp_sampler is None or record.logp_old is None or _has_same_weights(case):
        return None
    gap = logp_gap(record, "logp_sampler", "logp_old")
    if gap.size < MIN_TOKENS or has_older_samples(record):
        return None
    size, at_start = mean(np.abs(gap)), mean(np.abs(logp_gap(start, "logp_sampler", "logp_old")))
    limit = MOST_PER_UPDATE * version
    if size <= limit or not at_start < MAX_START_GAP or not _is_between_networks(case):
        return None
    return failed_finding(
        f"sampler and learner differ by {size:.3g} nats after {count_updates(version)} (limit "
        f"{limit:.3g}: farther than any older weights), {mean(gap):+.3g} in the mean, and by "
        f"{at_start:.2g} before the first",
        gap=size,
        mean=mean(gap),
    )


def _has_same_weights(case: Case) -> bool:
    """Return whether the fingerprints of both sides agree; without them, the set-up decides."""
    sampler, facts = case.run.get("sampler"), case.record.facts
    published, loaded = (facts.get(f"weights_{side}") for side in ("published", "loaded"))
    if published is not None and loaded is not None:
        return bool(published == loaded)
    return isinstance(sampler, Mapping) and bool(sampler.get("shares_weights"))


def _is_between_networks(case: Case) -> bool:
    """Return whether the gap has the form of two networks, and no other explanation."""
    record = case.record
    if case.measure_once(compete_on_sampler_gap, record).winner is not None:
        return False
    tokens = collect_gap_tokens(record, "logp_sampler")
    size = mean(np.abs(tokens.gap))
    rows = tokens.row_gaps[np.isfinite(tokens.row_gaps)]
    is_surprised = tokens.entropy is None or _surprise_errors(case) > MIN_ERRORS
    return (
        mean(tokens.gap) > MIN_BIAS_RATIO * size
        and fraction_true(rows > size / 5) > MIN_ROW_FRACTION
        and is_surprised
    )


def _surprise_errors(case: Case) -> float:
    """Return the learner's surprise above its entropy in standard errors, over the recent steps.

    A step of few groups has few of them; the samples of different steps are independent.
    """
    errors = [
        case.measure_once(_step_surprise, record).errors
        for record in case.recent_records
        if record.logp_sampler is not None and record.logp_old is not None
    ]
    return sum(errors) / math.sqrt(max(len(errors), 1))


def _step_surprise(record: StepRecord) -> SurpriseExcess:
    tokens = collect_gap_tokens(record, "logp_sampler")
    return surprise_excess(tokens, tokens.logp)


def _judge_path(case: Case, summary: str) -> Finding:
    """Judge after updates: older weights are at most as far as the policy has moved."""
    if not _has_start_reference(case.record, case.run.get("reference")):
        return no_data_finding(
            "old weights cannot be told from others without the start's log-probs"
        )
    moved = rms_logp_gap(case.record, "logp_ref", "logp_old")
    distances = [
        rms_logp_gap(case.record, "logp_sampler", side) for side in ("logp_old", "logp_ref")
    ]
    return (failed_finding if min(distances) > MIN_PATH_RATIO * moved else passed_finding)(
        f"{summary}; it is {distances[0]:.3g} nats from the policy and {distances[1]:.3g} from the "
        f"start, which are {moved:.3g} apart (limit three times that)",
        moved=moved,
    )


def _has_start_reference(record: StepRecord, reference: object) -> bool:
    if record.logp_ref is None or not isinstance(reference, Mapping):
        return False
    is_fixed = not reference.get("sync_every") and not reference.get("ema")
    return is_fixed and reference.get("wanted") == "start"


CHECK = Check(
    name="corrupted-sync",
    description="the sampler has weights that the learner never had",
    stage=Stage.SAMPLER,
    needs=(
        *("record.logp_sampler", "record.logp_old", "record.entropy", "run.sampler"),
        "facts.learner_version",
    ),
    fix="Compare a checksum of every tensor on both sides after a sync, by name and shape: packed, "
    "sharded, tied and quantised ones, buffers, adapters with their scale; send the missing ones.",
    judge=judge_case,
    confirm=confirm_by_distance,
    explains=(
        *("stale-sampler", "imprecise-logp", "step-too-big", "unexplained-gap"),
        *("equal-rewards", "context-truncated", "malformed-output"),
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.group",
        "record.logp_ref",
        "facts.weights_published",
        "facts.weights_loaded",
        "run.reference",
        "probes.sampler_sync",
    ),
    not_recorded="fingerprints of single tensors, except those of klinic's own syncs: the form of "
    "the gap shows two networks",
)
