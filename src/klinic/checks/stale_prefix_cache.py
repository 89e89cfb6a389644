"""stale-prefix-cache: the sampler's prefix cache outlives the weights that filled it."""

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
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap
from klinic.checks.measures import (
    OLDER_SAMPLES,
    column_difference,
    finite_trained_tokens,
    has_older_samples,
    rms,
    row_numbers,
)

MIN_GAP = 2e-3  # nats: fp32 engines differ by 1e-6, a typical update by more than this
MIN_GAP_RATIO = 5.0  # times the gap of rows that no cache served
MIN_TOKENS = 30  # tokens of each kind


def judge_case(case: Case) -> Finding:
    """Flag gaps on exactly the rows whose prompts were served from a cache.

    Looks for
        The gap between sampler and learner on rows that a prefix cache served, and on others;
        and the same right after a sync, after a prompt that is repeated at every sync and after
        a new one.
    Why it matters
        Keys and values of outdated weights are mixed with new ones. The mismatch grows within a
        job, vanishes when the engine restarts, and affects repeated prompts only.
    Confirmed when
        Rows with cached tokens have a gap above 0.002 nats and five times that of the others;
        or, right after a sync, the repeated prompt has one above 0.0002 nats in fp32 (0.3 in
        bf16) and five times that of the new one. No other explanation of the gap explains more.
    Ruled out when
        Rows with and without cached tokens have the same gap.
    Confused with
        stale-sampler (all rows); imprecise-logp (all rows, and from the first step on).
    """
    sync = sampler_sync.diagnose_sync(
        case.probe_results.get("sampler_sync"), sampler_sync.sampler_dtype(case.run)
    )
    if sync is not None and sync.cause == sampler_sync.PREFIX_CACHE:
        return failed_finding(sync.summary)
    record = case.record
    if has_older_samples(record):
        return no_data_finding(OLDER_SAMPLES)
    assert record.cached_tokens is not None  # noqa: S101 - needed
    mask = finite_trained_tokens(record, "logp_sampler", "logp_old")
    token_gap = column_difference(record, "logp_sampler", "logp_old")
    is_cached = (record.cached_tokens > 0)[row_numbers(record)]
    cached, fresh = token_gap[mask & is_cached], token_gap[mask & ~is_cached]
    if not cached.size:
        return passed_finding("no row was served by a cache")
    if cached.size < MIN_TOKENS or fresh.size < MIN_TOKENS:
        return no_data_finding(f"{cached.size} cached and {fresh.size} other tokens: too few")
    cached_gap, fresh_gap = rms(cached), rms(fresh)
    limit = max(MIN_GAP, MIN_GAP_RATIO * fresh_gap)
    summary = (
        f"the gap is {cached_gap:.3g} nats on rows with cached "
        f"tokens (limit {limit:.3g}) and {fresh_gap:.3g} "
        "on the others"
    )
    is_lost = case.measure_once(compete_on_sampler_gap, record).is_lost_by(GapModel.CACHE)
    return (failed_finding if cached_gap > limit and not is_lost else passed_finding)(
        summary, cached=cached_gap, fresh=fresh_gap
    )


CHECK = Check(
    name="stale-prefix-cache",
    description="the sampler's prefix cache outlives the weights that filled it",
    stage=Stage.SAMPLER,
    needs=("record.cached_tokens", "record.logp_sampler", "record.logp_old"),
    fix="Reset the engine's prefix cache and multimodal caches after every weight sync.",
    judge=judge_case,
    explains=("stale-sampler", "imprecise-logp", "unexplained-gap"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "facts.learner_version",
        "run.sampler",
        "probes.sampler_sync",
    ),
    not_recorded="the age of cached blocks: engines do not report it",
)
