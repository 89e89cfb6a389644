"""kl-sign-flipped: the KL is maximised."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import no_kl_term

OPPOSITE = -0.9  # cosine


def judge(case: Case) -> Finding:
    """Flag a KL term that pushes away from the reference.

    Looks for
        The direction of the KL term's part in the real gradient, against what it should be.
    Why it matters
        With a small coefficient the run looks well; with a larger one it collapses, and the
        coefficient is raised further because the KL is too high.
    Confirmed when
        The cosine of the two is below -0.9, and the term is not rather that of k1: the gradient of
        a score, which may point anywhere by chance.
    Ruled out when
        It is not; or the policy has been updated and has not left the reference; or no KL term was
        asked for.
    Confused with
        step-too-big (the term pulls back, and too little); kl-gradient-wrong (it points neither
        way).
    """
    answer = case.answers["kl_gradient"]
    cosine, like = answer["cosine"], answer.get("looks_like")
    if cosine is None and case.version:
        return passed("policy and reference still agree: no term has pushed them apart")
    if cosine is None:
        return no_data("policy and reference agree, so no term has a gradient yet")
    summary = (
        f"the KL term's gradient has a cosine of {cosine:.4f} with what it should be (limit "
        f"{OPPOSITE:g}); it looks like {like}"
    )
    flipped = cosine < OPPOSITE and (like != "k1" or case.run.get("estimator") == "k1")
    return (failed if flipped else passed)(summary, cosine=float(cosine))


CHECK = Check(
    name="kl-sign-flipped",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Add the KL term to a loss that is minimised, or subtract it from a reward.",
    judge=judge,
    alibi=no_kl_term,
    explains=(
        *("kl-gradient-wrong", "step-too-big", "kl-tail-dominates", "reward-hacking"),
        "equal-rewards",
    ),
)
