"""kl-sign-flipped: the KL is maximised."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed

OPPOSITE = -0.9  # cosine


def judge(case: Case) -> Finding:
    """Flag a KL term that pushes away from the reference.

    Looks for
        The direction of the KL term's part in the real gradient, against what it should be.
    Why it matters
        With a small coefficient the run looks well; with a larger one it collapses, and the
        coefficient is raised further because the KL is too high.
    Confirmed when
        The cosine of the two is below -0.9.
    Ruled out when
        It is not.
    Confused with
        step-too-big (the term pulls back, and too little); kl-gradient-wrong (it points neither
        way).
    """
    cosine = case.answers["kl_gradient"]["cosine"]
    if cosine is None:
        return no_data("policy and reference agree, so no term has a gradient yet")
    summary = (
        f"the KL term's gradient has a cosine of {cosine:.4f} with what it should be (limit "
        f"{OPPOSITE:g})"
    )
    return (failed if cosine < OPPOSITE else passed)(summary, cosine=float(cosine))


CHECK = Check(
    name="kl-sign-flipped",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Add the KL term to a loss that is minimised, or subtract it from a reward.",
    judge=judge,
    explains=("kl-gradient-wrong", "step-too-big", "kl-tail-dominates", "reward-hacking"),
)
