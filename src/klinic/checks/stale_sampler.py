"""stale-sampler: the sampler keeps old weights."""

from dataclasses import replace

import numpy as np

from klinic.checks import sampler_sync
from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import (
    column_difference,
    finite_trained_tokens,
    rms,
    rms_logp_gap,
    row_numbers,
)
from klinic.evidence.record import StepRecord

MIN_GAP_GROWTH = (
    5.0  # times the gap of the first step; engine differences do not grow with training
)
MIN_GAP = 2e-3  # nats: fp32 engines differ by 1e-6, a typical update by more than this
MAX_REFERENCE_RATIO = 2.0  # times the gap of the first step: two engines with the same weights
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag a sampler that samples from outdated weights.

    Looks for
        A gap between sampler and learner that did not exist before the first update and exists
        now, although the sampler reports the newest version; and fingerprints of the published
        weights and of those in use. Right after a sync, tokens that an engine sampled after a
        new prompt, scored by the policy.
    Why it matters
        Adapters that were never delivered, a sleep mode that restores old weights, a sync that
        transfers only some tensors: completions never change, rewards stay flat, and it looks
        like samples that are merely old.
    Confirmed when
        The two fingerprints differ; or, right after a sync, the new prompt shows a distance
        above 0.0002 nats in fp32 (0.3 in bf16) that no temperature explains; or the gap of the
        step is above 0.002 nats and five times that of the first step, on rows that no prefix
        cache served. A sampler that agrees with the reference excludes stale-prefix-cache.
    Ruled out when
        The gap is that of the first step after updates were made.
    Confused with
        samples-too-old (the tokens carry an older version); stale-prefix-cache (only rows that
        a cache served); imprecise-logp and temperature-on-one-side (the gap exists before the
        first update).
    """
    if (sync_finding := _judge_sync(case)) is not None:
        return sync_finding
    if case.learner_version == 0:
        return no_data_finding("before the first update old and new weights are equal")
    if case.start is None:
        return no_data_finding("the step of the first update was not recorded")
    if _reports_older_version(case):
        return passed_finding("the sampler reports an older version itself")
    fresh_gap = _uncached_gap(case)
    if fresh_gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    start_gap = case.measure_once(_sampler_gap, case.start)
    limit = max(MIN_GAP, MIN_GAP_GROWTH * start_gap)
    current_gap, reference_gap = rms(fresh_gap), _reference_gap(case)
    summary = (
        f"sampler and learner are {current_gap:.3g} nats apart "
        f"after {case.learner_version} updates (limit "
        f"{limit:.3g}: five times that of the first step)"
    )
    if reference_gap is not None:
        summary += f"; sampler and reference are {reference_gap:.3g} nats apart"
    finding = (failed_finding if current_gap > limit else passed_finding)(
        summary, gap=current_gap, limit=limit
    )
    # after a stale cache, tokens still use new weights, so they match no single policy
    matches_reference = reference_gap is not None and reference_gap <= max(
        MIN_GAP, MAX_REFERENCE_RATIO * start_gap
    )
    return replace(finding, excludes=("stale-prefix-cache",)) if matches_reference else finding


def _judge_sync(case: Case) -> Finding | None:
    """Return a finding from fingerprints or the sync probe, available before sampling."""
    facts = case.record.facts
    published, loaded = facts.get("weights_published"), facts.get("weights_loaded")
    if published is not None and loaded is not None and published != loaded:
        return failed_finding(
            f"the sampler uses weights {str(loaded)[:8]}, published were {str(published)[:8]}"
        )
    sync = sampler_sync.diagnose_sync(
        case.probe_results.get("sampler_sync"), sampler_sync.sampler_dtype(case.run)
    )
    if sync is None or sync.cause != sampler_sync.WEIGHTS:
        return None
    return failed_finding(sync.summary)


def _reports_older_version(case: Case) -> bool:
    record, version = case.record, case.learner_version
    if record.weight_version is None or version is None or not record.loss_mask.any():
        return False
    return bool((record.weight_version[record.loss_mask] < version).any())


def _sampler_gap(record: StepRecord) -> float:
    return rms_logp_gap(record, "logp_sampler", "logp_old")


def _uncached_gap(case: Case) -> np.ndarray:
    """Return the gap on rows that no prefix cache served."""
    record = case.record
    mask = finite_trained_tokens(record, "logp_sampler", "logp_old")
    if record.cached_tokens is not None:
        mask = mask & (record.cached_tokens == 0)[row_numbers(record)]
    return np.asarray(column_difference(record, "logp_sampler", "logp_old")[mask])


def _reference_gap(case: Case) -> float | None:
    if case.record.logp_ref is None:
        return None
    return rms_logp_gap(case.record, "logp_sampler", "logp_ref")


CHECK = Check(
    name="stale-sampler",
    description="the sampler keeps old weights",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old", "facts.learner_version"),
    fix="Compare a hash of the pushed weights with the engine's after every sync; push merged "
    "weights, or the adapter under a new name, and push again after a sleep of the engine.",
    judge=judge_case,
    explains=("step-too-big", "reward-hacking", "kl-tail-dominates"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_ref",
        "record.weight_version",
        "facts.weights_published",
        "facts.weights_loaded",
        "run.sampler",
        "probes.sampler_sync",
    ),
)
