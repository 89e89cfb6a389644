"""kl-gradient-wrong: the gradient of the KL estimator is not that of the KL."""

from collections.abc import Mapping

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
from klinic.checks.measures import rule_out_without_kl
from klinic.maths.kl_estimators import ESTIMATORS, Gradient

MAX_RATIO_ERROR = 0.03  # of the ratio to 1: rounding of fp32 leaves 1e-6, of bf16 1e-2
MIN_COSINE = 0.999  # cosine
MAX_RELATIVE_NORM = (
    1e-6  # of the score's gradient: allowed for a term where policy and reference agree
)
OTHER_MULTIPLES = (0.0, 2.0)  # left to kl-not-applied
FLIPPED_COSINE = -0.9  # cosine, left to kl-sign-flipped
PARALLEL_COSINE = 0.99  # cosine above which only the norm differs


def judge_case(case: Case) -> Finding:
    """Flag a KL term whose gradient is not the one that its estimator defines.

    Looks for
        The contribution of the KL term to the actual gradient (with the coefficient at 1 and at
        0), against the gradient that the estimator defines, computed independently.
    Why it matters
        On policy, k1 as a loss, summed over tokens, has an expected gradient of 0, and unclamped k3
        descends, token by token, the KL in the other direction, with weights that explode: raising
        the coefficient then has no effect, or does harm.
    Confirmed when
        The two differ by 3% in norm, or in direction; or the term has a gradient where policy
        and reference agree; or the recipe itself selects an estimator without a gradient (k1).
        A loss that the user overrides has its own estimator and average: there, only if the term
        looks like one without a gradient.
    Ruled out when
        They are equal; or the run has no KL term.
    Confused with
        kl-not-applied (no gradient arrives, or twice as much); kl-sign-flipped (the opposite).
    """
    name = case.run["estimator"]
    estimator = ESTIMATORS.get(str(name))
    if estimator is not None and estimator.gradient is Gradient.ZERO:
        return failed_finding(f"the recipe selects {name}: {estimator.sentence}")
    probe = case.probe_results["kl_gradient"]
    ratio, cosine, closest_term = probe["ratio"], probe["cosine"], probe["looks_like"]
    norm, score = float(probe["norm"] or 0), float(probe["score_norm"] or 0)
    if ratio is None or cosine is None:
        if norm > MAX_RELATIVE_NORM * score > 0:
            return failed_finding(
                f"policy and reference agree, and the term has a gradient of norm {norm:.3g} "
                f"(limit 0): it looks like {closest_term}",
                norm=norm,
            )
        return no_data_finding("policy and reference agree, so no term has a gradient yet")
    is_multiple = cosine > PARALLEL_COSINE and any(
        abs(ratio - m) < MAX_RATIO_ERROR for m in OTHER_MULTIPLES if m
    )
    flipped = cosine < FLIPPED_COSINE and (closest_term != "k1" or name == "k1")
    if abs(ratio) < MAX_RATIO_ERROR or is_multiple or flipped:
        return passed_finding(f"{ratio:.3f} times the gradient of {name}: left to another check")
    wrong = abs(ratio - 1) > MAX_RATIO_ERROR or cosine < MIN_COSINE
    if _has_own_loss(case.run.get("loss")):
        own_estimator = ESTIMATORS.get(str(closest_term))
        wrong = own_estimator is not None and own_estimator.gradient is Gradient.ZERO
    summary = (
        f"the term's gradient is {ratio:.3f} times that of {name} "
        f"(limit 1 +- {MAX_RATIO_ERROR:g}), with a "
        f"cosine of {cosine:.4f} (limit {MIN_COSINE:g}); it looks like {closest_term}"
    )
    figures = {"ratio": float(ratio), "cosine": float(cosine)}
    if not wrong and estimator is not None and estimator.gradient in (Gradient.FORWARD_TOKEN,):
        return warning_finding(f"{summary}. {estimator.sentence}", **figures)
    return (failed_finding if wrong else passed_finding)(summary, **figures)


def _has_own_loss(loss: object) -> bool:
    return isinstance(loss, Mapping) and loss.get("overridden") is True


CHECK = Check(
    name="kl-gradient-wrong",
    description="the gradient of the KL estimator is not that of the KL",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient", "run.estimator"),
    fix="Use an estimator whose gradient is that of the KL (kl.estimator unbiased), and test it "
    "with klinic verify module:function.",
    judge=judge_case,
    rule_out=rule_out_without_kl,
    change={"kl.estimator": "unbiased"},
    explains=("step-too-big", "kl-tail-dominates", "reward-hacking"),
    reads=(
        "facts.kl_coef",
        "record.kl_exact",
        "run.loss",
    ),
)
