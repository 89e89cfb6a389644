"""stale-sampler: the sampler keeps old weights."""

from dataclasses import replace

import numpy as np

from klinic.checks import after_sync
from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import difference, known_tokens, rms, rms_gap, row_numbers
from klinic.evidence.record import StepRecord

GREW = 5.0  # times the gap of the first step; engine differences do not grow with training
FLOOR = 2e-3  # nats: fp32 engines differ by 1e-6, a typical update by more than this
SAME = 2.0  # times the gap of the first step: two engines with the same weights
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
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
    if (seen := _seen_at_sync(case)) is not None:
        return seen
    if case.version == 0:
        return no_data("before the first update old and new weights are equal")
    if case.start is None:
        return no_data("the step of the first update was not recorded")
    if _says_older(case):
        return passed("the sampler reports an older version itself")
    now = _fresh_gap(case)
    if now.size < ENOUGH:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    first = case.of(_apart, case.start)
    limit = max(FLOOR, GREW * first)
    apart, to_reference = rms(now), _to_reference(case)
    summary = (
        f"sampler and learner are {apart:.3g} nats apart after {case.version} updates (limit "
        f"{limit:.3g}: five times that of the first step)"
    )
    if to_reference is not None:
        summary += f"; sampler and reference are {to_reference:.3g} nats apart"
    found = (failed if apart > limit else passed)(summary, gap=apart, limit=limit)
    # after a stale cache, tokens still use new weights, so they match no single policy
    as_reference = to_reference is not None and to_reference <= max(FLOOR, SAME * first)
    return replace(found, never_by=("stale-prefix-cache",)) if as_reference else found


def _seen_at_sync(case: Case) -> Finding | None:
    """Return a finding from fingerprints or the sync probe, available before sampling."""
    facts = case.record.facts
    handed, used = facts.get("weights_published"), facts.get("weights_loaded")
    if handed is not None and used is not None and handed != used:
        return failed(f"the sampler uses weights {str(used)[:8]}, published were {str(handed)[:8]}")
    sync = after_sync.named(case.answers.get("sampler_sync"), after_sync.dtype_of(case.run))
    if sync is None or sync.cause != after_sync.WEIGHTS:
        return None
    return failed(sync.summary)


def _says_older(case: Case) -> bool:
    record, version = case.record, case.version
    if record.weight_version is None or version is None or not record.loss_mask.any():
        return False
    return bool((record.weight_version[record.loss_mask] < version).any())


def _apart(record: StepRecord) -> float:
    return rms_gap(record, "logp_sampler", "logp_old")


def _fresh_gap(case: Case) -> np.ndarray:
    """Return the gap on rows that no prefix cache served."""
    record = case.record
    known = known_tokens(record, "logp_sampler", "logp_old")
    if record.cached_tokens is not None:
        known = known & (record.cached_tokens == 0)[row_numbers(record)]
    return np.asarray(difference(record, "logp_sampler", "logp_old")[known])


def _to_reference(case: Case) -> float | None:
    if case.record.logp_ref is None:
        return None
    return rms_gap(case.record, "logp_sampler", "logp_ref")


CHECK = Check(
    name="stale-sampler",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old", "facts.learner_version"),
    fix="Compare a hash of the pushed weights with the engine's after every sync; push merged "
    "weights, or the adapter under a new name, and push again after a sleep of the engine.",
    judge=judge,
    explains=("step-too-big", "reward-hacking", "kl-tail-dominates"),
)
