"""kl-gradient-wrong: the gradient of the KL estimator is not that of the KL."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed, warned
from klinic.checks.measures import no_kl_term
from klinic.maths.kl_estimators import ESTIMATORS, Gradient

OFF = 0.03  # of the ratio to 1: rounding of fp32 leaves 1e-6, of bf16 1e-2
TURNED = 0.999  # cosine
NOTHING = 1e-6  # of the score's gradient: allowed for a term where policy and reference agree
MULTIPLES = (0.0, 2.0)  # left to kl-not-applied
FLIPPED = -0.9  # cosine, left to kl-sign-flipped
ALONG = 0.99  # cosine above which only the norm differs


def judge(case: Case) -> Finding:
    """Flag a KL term whose gradient is not the one that its estimator defines.

    Looks for
        The contribution of the KL term to the actual gradient (with the coefficient at 1 and at
        0), against the gradient that the estimator defines, computed independently.
    Why it matters
        k1 as a loss has an expected gradient of 0, k3 descends the KL in the other direction,
        with weights that explode: raising the coefficient then has no effect, or does harm.
    Confirmed when
        The two differ by 3% in norm, or in direction; or the term has a gradient where policy
        and reference agree; or the recipe itself selects an estimator without a gradient (k1).
    Ruled out when
        They are equal; or the run has no KL term.
    Confused with
        kl-not-applied (no gradient arrives, or twice as much); kl-sign-flipped (the opposite).
    """
    name = case.run["estimator"]
    known = ESTIMATORS.get(str(name))
    if known is not None and known.gradient is Gradient.ZERO:
        return failed(f"the recipe selects {name}: {known.sentence}")
    answer = case.answers["kl_gradient"]
    ratio, cosine, like = answer["ratio"], answer["cosine"], answer["looks_like"]
    norm, score = float(answer["norm"] or 0), float(answer["score_norm"] or 0)
    if ratio is None or cosine is None:
        if norm > NOTHING * score > 0:
            return failed(
                f"policy and reference agree, and the term has a gradient of norm {norm:.3g} "
                f"(limit 0): it looks like {like}",
                norm=norm,
            )
        return no_data("policy and reference agree, so no term has a gradient yet")
    simple = cosine > ALONG and any(abs(ratio - m) < OFF for m in MULTIPLES if m)
    flipped = cosine < FLIPPED and (like != "k1" or name == "k1")
    if abs(ratio) < OFF or simple or flipped:
        return passed(f"{ratio:.3f} times the gradient of {name}: left to another check")
    wrong = abs(ratio - 1) > OFF or cosine < TURNED
    summary = (
        f"the term's gradient is {ratio:.3f} times that of {name} (limit 1 +- {OFF:g}), with a "
        f"cosine of {cosine:.4f} (limit {TURNED:g}); it looks like {like}"
    )
    figures = {"ratio": float(ratio), "cosine": float(cosine)}
    if not wrong and known is not None and known.gradient in (Gradient.FORWARD_TOKEN,):
        return warned(f"{summary}. {known.sentence}", **figures)
    return (failed if wrong else passed)(summary, **figures)


CHECK = Check(
    name="kl-gradient-wrong",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient", "run.estimator"),
    fix="Use an estimator whose gradient is that of the KL (kl.estimator unbiased), and test it "
    "with klinic verify module:function.",
    judge=judge,
    alibi=no_kl_term,
    change={"kl.estimator": "unbiased"},
    explains=("step-too-big", "kl-tail-dominates", "reward-hacking"),
)
