"""Turns the measurements of a user's function into a verdict and one paragraph of advice.

The verdict is about the function as a term of the loss:

    correct      its gradient is that of KL(policy || reference) at every distance tokens reach
    conditional  only near the reference, up to a factor, or within the range of float32
    wrong        no gradient, the wrong sign, or not the gradient of a KL
"""

from dataclasses import dataclass

from klinic.verify.estimators import Verdict
from klinic.verify.function import FunctionMeasurement
from klinic.verify.known_values import KNOWN_VALUES
from klinic.verify.limits import (
    breaks_within_reach,
    describe_limits,
    describe_off_policy,
    describe_own_length,
    needs_sum,
    reverses_within_reach,
)
from klinic.verify.recommendation import (
    REVERSE_KL_GRADIENTS,
    has_reverse_kl_gradient,
    is_one,
    recommend_action,
)

OFF_POLICY_NOTES = {
    "k1": " On completions of an older policy it pushes away from the sampled tokens.",
}
FORWARD_KL_GRADIENTS = {
    "forward_token": "that of KL(reference || policy)",
    "forward_sequence": "that of KL(reference || policy) between completions",
}
OTHER_GRADIENTS = {
    "half_chi_square": "half that of chi-square, which grows like exp(k1) on tokens that are "
    "likelier under the policy than under the reference",
    "sign_token": "sign(k1) grad logp: as strong near the reference as far from it, so it does "
    "not vanish as the policy returns to the reference",
}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict and the paragraph that explains it."""

    verdict: Verdict
    value: str
    advice: str


def judge(measured: FunctionMeasurement) -> Judgement:
    """Return the verdict on a measured function."""
    value = _describe_value(measured)
    sentences = [
        f"Its mean is {value}.",
        _describe_gradient(measured),
        *describe_own_length(measured),
        *describe_limits(measured),
        *describe_off_policy(measured),
    ]
    verdict = _choose_verdict(measured)
    return Judgement(
        verdict=verdict,
        value=value,
        advice=" ".join([*sentences, *recommend_action(measured, verdict)]),
    )


def _choose_verdict(measured: FunctionMeasurement) -> Verdict:
    identity = measured.gradient
    is_reversed = measured.off_policy is not None and measured.off_policy.is_reversed
    if is_reversed or reverses_within_reach(measured):
        return "wrong"
    if identity.target in REVERSE_KL_GRADIENTS and identity.scale > 0:
        return "correct" if _is_exact(measured) else "conditional"
    if identity.target in FORWARD_KL_GRADIENTS and identity.scale > 0:
        return "conditional"
    is_near = measured.nearly is not None and measured.nearly.scale > 0
    return "conditional" if is_near and has_reverse_kl_gradient(measured) else "wrong"


def _is_exact(measured: FunctionMeasurement) -> bool:
    """Whether an identified gradient has the multiple 1 and holds wherever it was checked."""
    return (
        is_one(measured.gradient.scale)
        and not measured.failed_checks
        and not needs_sum(measured)
        and not breaks_within_reach(measured)
        and (measured.off_policy is None or measured.off_policy.is_corrected)
        and (measured.vocabulary is None or measured.vocabulary.is_within_tolerance)
    )


def _describe_value(measured: FunctionMeasurement) -> str:
    if measured.value == "zero":
        return "zero"
    if measured.value is None and has_reverse_kl_gradient(measured):
        return "no KL: log k1 or k3 as well"
    if measured.value is None:
        low, high = measured.value_to_kl
        return f"no known quantity; it was {low:.2f} to {high:.2f} times KL(policy || reference)"
    return _format_factor(measured.value_scale) + KNOWN_VALUES[measured.value]


def _format_factor(scale: float) -> str:
    if is_one(scale):
        return ""
    return "minus " if is_one(-scale) else f"{scale:.4g} times "


def _describe_gradient(measured: FunctionMeasurement) -> str:
    identity = measured.gradient
    if measured.detached:
        return "No gradient flows through it: added to a loss it does nothing."
    if identity.target == "zero":
        return (
            "Its gradient averages to zero: added to a loss it adds nothing but noise."
            + OFF_POLICY_NOTES.get(measured.acts_like or "", "")
        )
    descriptions = REVERSE_KL_GRADIENTS | FORWARD_KL_GRADIENTS | OTHER_GRADIENTS
    if identity.target is None or identity.target not in descriptions:
        return _describe_unknown_gradient(measured, descriptions)
    if identity.scale < 0:
        return (
            "It has the wrong sign: its gradient is "
            f"{_format_factor(identity.scale)}{descriptions[identity.target]}. "
            "A trainer that minimises it pushes the policy away from the reference."
        )
    if identity.target in FORWARD_KL_GRADIENTS:
        return (
            f"But its gradient is {_format_factor(identity.scale)}{descriptions[identity.target]}: "
            "right to first order "
            "next to the reference, a different objective far from it"
            + (", where a token weighs exp(d)." if measured.acts_like == "k3" else ".")
        )
    return (
        "Added to a loss its gradient is "
        f"{_format_factor(identity.scale)}{descriptions[identity.target]}."
    )


def _describe_unknown_gradient(measured: FunctionMeasurement, descriptions: dict[str, str]) -> str:
    nearly = measured.nearly
    if nearly is not None and nearly.target in descriptions:
        return (
            f"Its gradient is within {nearly.error:.1g}, relative to itself, of "
            f"{_format_factor(nearly.scale)}{descriptions[nearly.target]}, but not equal."
        )
    unknown = "Its gradient is not that of a KL that klinic knows."
    similar_term = measured.acts_like
    return (
        f"{unknown} Close to the reference it pulls like {similar_term}."
        if similar_term
        else unknown
    )
