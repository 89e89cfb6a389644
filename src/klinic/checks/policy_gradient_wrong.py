"""policy-gradient-wrong: the policy term has no gradient, or not that of its advantages."""

import math

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

MIN_NORM_FRACTION = 1e-6  # of the expected norm: below, the term is constant
MIN_COSINE = 0.2  # other aggregations, clips and one-sided advantages leave more; 0 is unrelated


def judge_case(case: Case) -> Finding:
    """Flag a policy term that does not follow its advantages.

    Looks for
        The gradient of the loss with its advantages less that with advantages of 0, so that the
        KL term cancels, against the sum over tokens of -advantage times the gradient of logp.
        Where the ratio is 1, every policy loss has this direction. Without such a probe, the sign
        of the policy term in the recorded loss. And the sign of the learning rate.
    Why it matters
        With a detached ratio, a constant instead of the log-probs, or the wrong sign, the
        weights still move: by the KL term, an entropy bonus, or away from the reward. Loss and
        gradient norm look healthy.
    Confirmed when
        The gradient is 0, or its cosine with the expected one is below 0.2; or the learning rate
        is negative: the update climbs the loss. Without a probe: the loss of the recent steps
        contains minus the policy term, or none, within rounding, for every form that fits. On
        policy, with advantages that sum to 0, the value of the term is 0 and decides nothing.
    Ruled out when
        Both have one direction.
    Confused with
        policy-does-not-move (the whole gradient is 0); loss-scaled-wrong (the direction is
        right, the size depends on the micro-batches); broken-reward (the advantages are wrong,
        and the gradient follows them).
    """
    if (fault := _negative_rate(case)) is not None:
        return fault
    probe = case.probe_results["policy_gradient"]
    norm, expected, cosine = (probe.get(name) for name in ("norm", "expected_norm", "cosine"))
    if not expected or norm is None or cosine is None or not math.isfinite(norm):
        return no_data_finding("advantages are 0, or the gradient is not finite")
    summary = (
        f"the policy term has a gradient of norm {norm:.3g} ({expected:.3g} is expected), with a "
        f"cosine of {cosine:.3f} to the expected one (limit {MIN_COSINE:g})"
    )
    if case.record.facts.get("grad_norm") == 0:
        return passed_finding(f"{summary}: the whole gradient is 0, left to policy-does-not-move")
    is_fault = norm <= MIN_NORM_FRACTION * expected or cosine < MIN_COSINE
    return (failed_finding if is_fault else passed_finding)(
        summary, norm=float(norm), cosine=float(cosine)
    )


def _negative_rate(case: Case) -> Finding | None:
    rate = case.record.facts.get("learning_rate")
    if not isinstance(rate, int | float) or rate >= 0:
        return None
    return failed_finding(
        f"the learning rate is {rate:.3g}: the update climbs the loss (limit 0)", rate=float(rate)
    )


def confirm_from_loss(case: Case) -> Finding | None:
    """Fail if an update climbs the loss, or the loss has minus the policy term, or none."""
    if (fault := _negative_rate(case)) is not None:
        return fault
    fit = identify_loss(case)
    sign = None if fit is None else fit.signs.get("policy")
    if fit is None or sign in (None, Sign.RIGHT):
        return None
    description = "there is no policy term"
    if sign is Sign.WRONG:
        is_whole = fit.signs.get("kl") is Sign.WRONG
        description = "the whole loss is negated" if is_whole else "the policy term is negated"
    return failed_finding(f"{fit.sentence}: {description}", policy=fit.coefs.get("policy", 0.0))


CHECK = Check(
    name="policy-gradient-wrong",
    description="the policy term has no gradient, or not that of its advantages",
    stage=Stage.WIRING,
    needs=("probes.policy_gradient",),
    fix="Compute the policy term from log-probs that carry the gradient, detach only the old ones, "
    "and minimise minus advantage times ratio. Keep the learning rate above 0: a linear decay "
    "goes on below it after its last step.",
    judge=judge_case,
    confirm=confirm_from_loss,
    explains=("policy-does-not-move", "step-too-big"),
    reads=(
        "facts.grad_norm",
        "facts.learning_rate",
        "facts.grad_norm_kl",
        "facts.kl_coef",
        *LOSS_FIELDS,
    ),
)
