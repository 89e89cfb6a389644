"""kl-tail-dominates: a few tokens dominate the KL, or its exponential overflows."""

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
    warning_finding,
)
from klinic.checks.measures import logp_gap, mean, median
from klinic.maths import kl

TAIL_FRACTION = 0.01  # fraction of tokens, at least one
MIN_TAIL_KL_FRACTION = 0.9  # fraction of the summed k3 in the tail
MIN_WORST_LOG_RATIO = 5.0  # nats of logp_ref - logp: a k3 weight of 140
MIN_MEAN_KL = 0.2  # nats per token: below it the tail has no effect
MAX_MEDIAN_K1 = 0.1  # nats, median of |k1|: above it the whole policy has moved
EXPONENTIAL_ESTIMATORS = ("k3", "k3_reversed", "exp_k1_reward")
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
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
    log_ratio = logp_gap(case.record, "logp_ref", "logp_old")
    if log_ratio.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    k3 = np.sort(kl.k3(logp_p=-log_ratio, logp_q=np.zeros_like(log_ratio)))
    num_tail = max(1, round(TAIL_FRACTION * k3.size))
    tail_fraction = float(k3[-num_tail:].sum() / max(k3.sum(), 1e-300))
    mean_kl, median_k1, worst = mean(k3), median(np.abs(log_ratio)), float(log_ratio.max())
    is_tail = (
        tail_fraction > MIN_TAIL_KL_FRACTION
        and worst > MIN_WORST_LOG_RATIO
        and mean_kl > MIN_MEAN_KL
        and median_k1 < MAX_MEDIAN_K1
    )
    summary = (
        f"{num_tail} of {k3.size} tokens hold {tail_fraction:.0%} of k3 "
        f"(limit {MIN_TAIL_KL_FRACTION:.0%}); the mean is "
        f"{mean_kl:.3g} nats, the median of |k1| {median_k1:.3g}, "
        f"the worst token {worst:.1f} nats off"
    )
    figures = {"tail_share": tail_fraction, "worst": worst, "kl": mean_kl}
    if not is_tail:
        return passed_finding(summary, **figures)
    exponential = case.run["estimator"] in EXPONENTIAL_ESTIMATORS
    return (failed_finding if exponential else warning_finding)(summary, **figures)


CHECK = Check(
    name="kl-tail-dominates",
    description="a few tokens dominate the KL, or its exponential overflows",
    stage=Stage.DYNAMICS,
    needs=("record.logp_old", "record.logp_ref", "run.estimator"),
    fix="Use an estimator with linear tails (kl.estimator unbiased), and inspect the worst tokens: "
    "often end tokens and format markers.",
    judge=judge_case,
    change={"kl.estimator": "unbiased"},
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp",
        "record.token_ids",
        "facts.loss",
        "facts.grad_norm",
    ),
)
