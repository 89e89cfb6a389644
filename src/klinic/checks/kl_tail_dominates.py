"""kl-tail-dominates: a few tokens dominate the KL, or its exponential overflows."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed, warned
from klinic.checks.measures import gap, mean, median
from klinic.maths import kl

TAIL = 0.01  # fraction of tokens, at least one
SHARE = 0.9  # fraction of the summed k3 in the tail
FAR = 5.0  # nats of logp_ref - logp: a k3 weight of 140
MATTERS = 0.2  # nats per token: below it the tail has no effect
CALM = 0.1  # nats, median of |k1|: above it the whole policy has moved
EXPONENTIAL = ("k3", "k3_reversed", "exp_k1_reward")
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag a KL that a few extreme tokens dominate.

    Looks for
        The fraction of the summed k3 in the largest 1% of the trained tokens, the log-ratio of
        the worst of them, and whether the other tokens have moved at all.
    Why it matters
        k3 grows like exp(d). Where the reference assigns a token a much higher probability than
        the policy, one token dominates the KL and, differentiated, the gradient: norms of 1e5
        in a run whose policy has hardly moved.
    Confirmed when
        The tail holds 90%, a token is off by 5 nats, the mean is above 0.2 nats while the
        median is small, and the estimator is exponential.
    Ruled out when
        The tail holds less, or the median rose as well: then the policy has drifted. With an
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
        f"{num} of {k3.size} tokens hold {share:.0%} of k3 (limit {SHARE:.0%}); the mean is "
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
    fix="Use an estimator with linear tails (kl.estimator unbiased), and inspect the worst tokens: "
    "often end tokens and format markers.",
    judge=judge,
    change={"kl.estimator": "unbiased"},
)
