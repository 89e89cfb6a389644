"""kl-sign-flipped: the KL is maximised."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import no_kl_term

OPPOSITE = -0.9  # cosine


def judge(case: Case) -> Finding:
    """Flag a KL term that pushes away from the reference.

    Looks for
        The direction of the KL term's contribution to the actual gradient, against the expected
        one.
    Why it matters
        With a small coefficient the run looks healthy; with a larger one it collapses, and the
        coefficient is raised further because the KL is too high.
    Confirmed when
        The cosine of the two is below -0.9, and the term does not resemble k1: the gradient of
        a score, which can point anywhere by chance.
    Ruled out when
        It is not; or the policy has been updated and still equals the reference; or the run has
        no KL term.
    Confused with
        step-too-big (the term pulls back too weakly); kl-gradient-wrong (it points in neither
        direction).
    """
    answer = case.answers["kl_gradient"]
    cosine, like = answer["cosine"], answer.get("looks_like")
    if cosine is None and case.version:
        return passed("policy and reference still agree: no term has separated them")
    if cosine is None:
        return no_data("policy and reference agree, so no term has a gradient yet")
    summary = (
        f"the KL term's gradient has a cosine of {cosine:.4f} with the expected one (limit "
        f"{OPPOSITE:g}); it looks like {like}"
    )
    flipped = cosine < OPPOSITE and (like != "k1" or case.run.get("estimator") == "k1")
    return (failed if flipped else passed)(summary, cosine=float(cosine))


CHECK = Check(
    name="kl-sign-flipped",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Add the KL term to the minimised loss, or subtract it from the reward.",
    judge=judge,
    alibi=no_kl_term,
    explains=(
        *("kl-gradient-wrong", "step-too-big", "kl-tail-dominates", "reward-hacking"),
        "equal-rewards",
    ),
)
