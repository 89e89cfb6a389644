"""kl-tail-dominates: a handful of tokens carry the KL, or its exponential overflows."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed, warned
from klinic.checks.measures import gap, mean, median
from klinic.maths import kl

TAIL = 0.01  # of the tokens, and at least one
SHARE = 0.9  # of the summed k3 that they carry
FAR = 5.0  # nats by which the reference prefers a token: k3 gives it a weight of 140
MATTERS = 0.2  # nats per token: below it the tail carries next to nothing
CALM = 0.1  # nats, median of |k1|: above it the policy as a whole has left
EXPONENTIAL = ("k3", "k3_reversed", "exp_k1_reward")
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag a KL that is the work of its most extreme tokens.

    Looks for
        The share of the summed k3 in the largest 1% of the trained tokens, how far the reference
        prefers the worst of them, and whether the other tokens have moved at all.
    Why it matters
        k3 grows like exp(d). Where the reference likes a token far more than the policy does, one
        token is the whole KL and, differentiated, the whole gradient: norms of 1e5 in a run
        whose policy has hardly moved.
    Confirmed when
        The tail carries 90%, a token is 5 nats off, the mean is above 0.2 nats while the median
        is small, and the estimator is exponential.
    Ruled out when
        The tail carries less, or the median rose as well: then the policy has drifted. With an
        estimator of linear tails it is a warning: the curve jumps, the gradient does not.
    Confused with
        misaligned-logp (many tokens, k1 negative); step-too-big (the median rises).
    """
    d = gap(case.record, "logp_ref", "logp_old")
    if d.size < ENOUGH:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    k3 = np.sort(kl.k3(logp_p=-d, logp_q=np.zeros_like(d)))
    num = max(1, round(TAIL * k3.size))
    share = float(k3[-num:].sum() / max(k3.sum(), 1e-300))
    average, middle, worst = mean(k3), median(np.abs(d)), float(d.max())
    tail = share > SHARE and worst > FAR and average > MATTERS and middle < CALM
    summary = (
        f"{num} of {k3.size} tokens carry {share:.0%} of k3 (limit {SHARE:.0%}); the mean is "
        f"{average:.3g} nats, the median of |k1| {middle:.3g}, the worst token {worst:.1f} nats off"
    )
    figures = {"tail_share": share, "worst": worst, "kl": average}
    if not tail:
        return passed(summary, **figures)
    exponential = case.run["estimator"] in EXPONENTIAL
    return (failed if exponential else warned)(summary, **figures)


CHECK = Check(
    name="kl-tail-dominates",
    stage=Stage.DYNAMICS,
    needs=("record.logp_old", "record.logp_ref", "run.estimator"),
    fix="Use an estimator with linear tails (kl.estimator unbiased), and read the worst tokens: "
    "they are often ends and marks of format.",
    judge=judge,
    change={"kl.estimator": "unbiased"},
)
