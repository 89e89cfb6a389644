"""kl-sign-flipped: the KL is maximised."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.loss_models import LOSS_FIELDS, Sign, identify_loss
from klinic.checks.measures import rule_out_without_kl

FLIPPED_COSINE = -0.9  # cosine


def judge_case(case: Case) -> Finding:
    """Flag a KL term that pushes away from the reference.

    Looks for
        The direction of the KL term's contribution to the actual gradient, against the expected
        one. Without such a probe, the sign of the KL term in the recorded loss.
    Why it matters
        With a small coefficient the run looks healthy; with a larger one it collapses, and the
        coefficient is raised further because the KL is too high.
    Confirmed when
        The cosine of the two is below -0.9, and the term does not resemble k1: the gradient of
        a score, which can point anywhere by chance. Without a probe: the loss of the recent steps
        is the policy term minus the KL term, within rounding, for every form that fits.
    Ruled out when
        It is not; or the policy has been updated and still equals the reference; or the run has
        no KL term.
    Confused with
        step-too-big (the term pulls back too weakly); kl-gradient-wrong (it points in neither
        direction).
    """
    probe = case.probe_results["kl_gradient"]
    cosine, closest_term = probe["cosine"], probe.get("looks_like")
    if cosine is None and case.learner_version:
        return passed_finding("policy and reference still agree: no term has separated them")
    if cosine is None:
        return no_data_finding("policy and reference agree, so no term has a gradient yet")
    summary = (
        f"the KL term's gradient has a cosine of {cosine:.4f} with the expected one (limit "
        f"{FLIPPED_COSINE:g}); it looks like {closest_term}"
    )
    flipped = cosine < FLIPPED_COSINE and (
        closest_term != "k1" or case.run.get("estimator") == "k1"
    )
    return (failed_finding if flipped else passed_finding)(summary, cosine=float(cosine))


def confirm_from_loss(case: Case) -> Finding | None:
    """Fail if the recorded loss contains minus the KL term; its gradient may differ, so no pass."""
    fit = identify_loss(case)
    if fit is None or fit.signs.get("kl") is not Sign.WRONG:
        return None
    if fit.signs.get("policy") is Sign.WRONG:
        return None  # the whole loss is negated
    return failed_finding(f"{fit.sentence}: the KL term is subtracted", kl=fit.coefs.get("kl", 0.0))


CHECK = Check(
    name="kl-sign-flipped",
    description="the KL is maximised",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Add the KL term to the minimised loss, or subtract it from the reward.",
    judge=judge_case,
    rule_out=rule_out_without_kl,
    confirm=confirm_from_loss,
    explains=(
        *("kl-gradient-wrong", "step-too-big", "kl-tail-dominates", "reward-hacking"),
        "equal-rewards",
    ),
    reads=(
        "facts.kl_coef",
        "run.estimator",
        *LOSS_FIELDS,
    ),
)
