"""stale-sampler: the sampler keeps old weights."""

from dataclasses import replace

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
from klinic.checks.gap_models import LOCALISED_MODELS, compete_on_sampler_gap
from klinic.checks.measures import (
    column_difference,
    finite_trained_tokens,
    has_older_samples,
    rms,
    rms_logp_gap,
    row_numbers,
)
from klinic.evidence.record import StepRecord
from klinic.evidence.verdict import Verdict

MIN_GAP_GROWTH = (
    5.0  # times the gap of the first step; engine differences do not grow with training
)
MIN_GAP = 2e-3  # nats: fp32 engines differ by 1e-6, a typical update by more than this
MAX_REFERENCE_RATIO = 2.0  # times the gap of the first step: two engines with the same weights
MAX_OTHER_FIT = 0.97  # explained by a formula of the gap: a setting that changed, not weights
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
        The gap is that of the first step after updates were made, a formula explains 97% of it
        (a temperature or truncation that changed), or the sampler agrees with `logp` and not
        with `logp_old`, which then is another policy's.
    Confused with
        samples-too-old (the tokens carry an older version); stale-prefix-cache (only rows that
        a cache served); imprecise-logp and temperature-on-one-side (the gap exists before the
        first update).
    """
    if (sync_finding := _judge_sync(case)) is not None:
        return sync_finding
    start_gap = _expected_gap(case)
    if start_gap is None:
        return no_data_finding(
            "the step before the first update and one after the declared lag are needed"
        )
    if has_older_samples(case.record):
        return passed_finding("the sampler reports an older version itself")
    fresh_gap = _uncached_gap(case)
    if fresh_gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    limit = max(MIN_GAP, MIN_GAP_GROWTH * start_gap)
    current_gap, reference_gap = rms(fresh_gap), _reference_gap(case)
    summary = (
        f"sampler and learner are {current_gap:.3g} nats apart "
        f"after {count_updates(case.learner_version)} (limit "
        f"{limit:.3g}: five times that of the first step)"
    )
    if reference_gap is not None:
        summary += f"; sampler and reference are {reference_gap:.3g} nats apart"
    finding = (failed_finding if current_gap > limit else passed_finding)(
        summary, gap=current_gap, limit=limit
    )
    if (reason := _other_reason(case, current_gap)) and finding.verdict is Verdict.FAIL:
        return passed_finding(f"{summary}; {reason}", gap=current_gap, limit=limit)
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


def _other_reason(case: Case, gap: float) -> str:
    """Return why weights are not old although there is a gap; empty if they may be."""
    record = case.record
    if record.logp is not None and gap > MIN_GAP_GROWTH * rms_logp_gap(
        record, "logp_sampler", "logp"
    ):
        return "the sampler agrees with `logp`, so `logp_old` is not the policy's"
    winner = case.measure_once(compete_on_sampler_gap, record).winner
    reference_gap = _reference_gap(case)
    if winner is None or winner.explained < MAX_OTHER_FIT or winner.model in LOCALISED_MODELS:
        return ""
    is_reference = reference_gap is not None and reference_gap < gap / MIN_GAP_GROWTH
    return "" if is_reference else f"{winner.model} explain {winner.explained:.0%} of it"


def _sampler_gap(record: StepRecord) -> float:
    return rms_logp_gap(record, "logp_sampler", "logp_old")


def _expected_gap(case: Case) -> float | None:
    """Return the gap of the first step, or of those up to the declared lag; None within them.

    A sampler that is behind by design, and reports no versions, has a gap in every later step.
    """
    if case.learner_version == 0 or case.start is None:
        return None
    first = case.measure_once(_sampler_gap, case.start)
    lag = (case.run.get("sampler") or {}).get("max_version_lag") or 0
    if not lag or case.record.weight_version is not None:
        return first
    if (case.learner_version or 0) <= lag:
        return None
    steps = [r for r in case.earlier if 0 < int(r.facts.get("learner_version") or 0) <= lag]
    gaps = [case.measure_once(_sampler_gap, r) for r in steps if r.logp_sampler is not None]
    return max([first, *gaps])


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
    explains=("step-too-big", "reward-hacking", "kl-tail-dominates", "unexplained-gap"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp",
        "record.logp_ref",
        "record.entropy",
        "record.weight_version",
        "facts.weights_published",
        "facts.weights_loaded",
        "run.sampler",
        "probes.sampler_sync",
    ),
)
