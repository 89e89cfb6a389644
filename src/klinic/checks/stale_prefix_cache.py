"""stale-prefix-cache: the sampler's prefix cache outlives the weights that filled it."""

from klinic.checks import after_sync
from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import difference, known_tokens, rms, row_numbers

FLOOR = 2e-3  # nats: fp32 engines differ by 1e-6, a typical update by more than this
TIMES = 5.0  # times the gap of rows that no cache served
ENOUGH = 30  # tokens of each kind


def judge(case: Case) -> Finding:
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
        bf16) and five times that of the new one.
    Ruled out when
        Rows with and without cached tokens have the same gap.
    Confused with
        stale-sampler (all rows); imprecise-logp (all rows, and from the first step on).
    """
    sync = after_sync.named(case.answers.get("sampler_sync"), after_sync.dtype_of(case.run))
    if sync is not None and sync.cause == after_sync.PREFIX:
        return failed(sync.summary)
    record = case.record
    assert record.cached_tokens is not None  # noqa: S101 - needed
    known = known_tokens(record, "logp_sampler", "logp_old")
    apart = difference(record, "logp_sampler", "logp_old")
    served = (record.cached_tokens > 0)[row_numbers(record)]
    cached, fresh = apart[known & served], apart[known & ~served]
    if not cached.size:
        return passed("no row was served by a cache")
    if cached.size < ENOUGH or fresh.size < ENOUGH:
        return no_data(f"{cached.size} cached and {fresh.size} other tokens: too few")
    bad, good = rms(cached), rms(fresh)
    limit = max(FLOOR, TIMES * good)
    summary = (
        f"the gap is {bad:.3g} nats on rows with cached tokens (limit {limit:.3g}) and {good:.3g} "
        "on the others"
    )
    return (failed if bad > limit else passed)(summary, cached=bad, fresh=good)


CHECK = Check(
    name="stale-prefix-cache",
    stage=Stage.SAMPLER,
    needs=("record.cached_tokens", "record.logp_sampler", "record.logp_old"),
    fix="Reset the engine's prefix cache and multimodal caches after every weight sync.",
    judge=judge,
    explains=("stale-sampler", "imprecise-logp"),
)
