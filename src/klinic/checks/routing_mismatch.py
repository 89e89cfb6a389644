"""routing-mismatch: sampler and learner route tokens to different experts."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import difference, known_tokens

SHARE = 0.05  # fraction of tokens routed differently in at least one layer
TIMES = 2.0  # times the gap of tokens routed to the same experts
ENOUGH = 30  # tokens of each kind


def judge(case: Case) -> Finding:
    """Flag a gap on tokens that sampler and learner route to different experts.

    Looks for
        The gap between sampler and learner on tokens whose experts differ between the two, and
        on tokens whose experts are equal.
    Why it matters
        A rounding error in a router sends a token to another expert, and its log-prob is that
        of another network: mixture-of-experts runs collapse where their dense equivalent is
        healthy.
    Confirmed when
        More than 5% of the tokens have a layer that differs, and their gap is twice that of the
        others.
    Ruled out when
        Experts are equal, or tokens whose experts differ have no larger gap.
    Confused with
        imprecise-logp (the gap exists without a difference in experts).
    """
    record = case.record
    if case.run["policy"].get("num_experts") == 0:
        return passed("the model has no experts")
    if record.routing_mismatch is None:
        return no_data("not recorded: `record.routing_mismatch`")
    known = known_tokens(record, "logp_sampler", "logp_old") & np.isfinite(record.routing_mismatch)
    apart = np.abs(difference(record, "logp_sampler", "logp_old"))
    elsewhere = known & (record.routing_mismatch > 0)
    same = known & (record.routing_mismatch == 0)
    share = float(elsewhere.sum() / max(int(known.sum()), 1))
    if share <= SHARE:
        return passed(f"{share:.1%} of the tokens have experts that differ (limit {SHARE:.0%})")
    if elsewhere.sum() < ENOUGH or same.sum() < ENOUGH:
        return no_data(f"{elsewhere.sum()} tokens with other experts, {same.sum()} with the same")
    bad, good = float(apart[elsewhere].mean()), float(apart[same].mean())
    summary = (
        f"{share:.0%} of the tokens have experts that differ (limit {SHARE:.0%}); their gap is "
        f"{bad:.3g} nats, that of the others {good:.3g} (limit twice)"
    )
    return (failed if bad > TIMES * good else passed)(summary, share=share, gap=bad, others=good)


CHECK = Check(
    name="routing-mismatch",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old", "run.policy"),
    fix="Replay the sampler's experts in the learner, or use ratios of whole completions (gspo).",
    judge=judge,
    change={"learner.loss": "gspo"},
    explains=("imprecise-logp", "stale-sampler"),
)
