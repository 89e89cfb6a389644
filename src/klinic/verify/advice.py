"""Turns the measurements of a user's function into a verdict and one paragraph of advice.

The verdict is about the function as a term of the loss:

    correct      its gradient is that of KL(policy || reference) at every distance tokens reach
    conditional  only near the reference, up to a factor, or within the range of float32
    wrong        no gradient, the wrong sign, or not the gradient of a KL
"""

from dataclasses import dataclass

from klinic.verify.estimators import OFF_POLICY_IDENTITIES, Verdict
from klinic.verify.extremes import Extremes, SideLimits
from klinic.verify.function import KNOWN_VALUES, FunctionMeasurement
from klinic.verify.toy_policies import COMPLETION_LENGTH

HALF_DTYPES = {"float16", "bfloat16"}
REACHABLE_DISTANCE = (
    60.0  # nats: log-prob distance to the reference that abandoned tokens can reach
)

USE_UNBIASED = (
    "Use the estimator `unbiased`: `(ratio * (logp - logp_ref)).detach() * logp` with ratio = "
    "exp(logp - logp_old).clamp(max=2), logp_old being that of the sampler."
)
OFF_POLICY_NOTES = {
    "k1": " On completions of an older policy it pushes away from the sampled tokens.",
}
REVERSE_KL_GRADIENTS = {
    "reverse_token": "the gradient of KL(policy || reference), token by token",
    "reverse_sequence": "the whole gradient of KL(policy || reference) between completions",
    "bucket_token": "the gradient of a lower bound of KL(policy || reference)",
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
        *_describe_numerics(measured),
    ]
    verdict = _choose_verdict(measured)
    return Judgement(
        verdict=verdict,
        value=value,
        advice=" ".join([*sentences, *_recommend_action(measured, verdict)]),
    )


def _choose_verdict(measured: FunctionMeasurement) -> Verdict:
    identity = measured.gradient
    if _reverses_within_reach(measured):
        return "wrong"
    if identity.target in REVERSE_KL_GRADIENTS and identity.scale > 0:
        is_exact = (
            _is_one(identity.scale)
            and not _breaks_within_reach(measured)
            and not _fails_off_policy(measured)
        )
        return "correct" if is_exact else "conditional"
    if identity.target in FORWARD_KL_GRADIENTS and identity.scale > 0:
        return "conditional"
    return "wrong"


def _is_one(scale: float) -> bool:
    return abs(scale - 1) < 1e-3  # a factor of 1.001 is rounding, one of 1.04 is a coefficient


def _fails_off_policy(measured: FunctionMeasurement) -> bool:
    """Whether a function that takes `logp_old` does not correct for the older policy."""
    return (
        measured.off_policy is not None and measured.off_policy.target not in OFF_POLICY_IDENTITIES
    )


def _breaks_within_reach(measured: FunctionMeasurement) -> bool:
    """Whether float32 or a dead zone breaks the gradient at a distance tokens can reach."""
    extremes = measured.extremes
    if measured.precision in HALF_DTYPES:
        return True
    if extremes is None:
        return False
    limits = [extremes.saturates_at, extremes.cancels_at, extremes.overflows_at]
    if measured.departure is not None:
        limits.append(measured.departure.departs_at)
    return any(_is_within_reach(sides) for sides in limits)


def _is_within_reach(sides: SideLimits) -> bool:
    edges = (sides.above, sides.below)
    return any(edge is not None and abs(edge) <= REACHABLE_DISTANCE for edge in edges)


def _reverses_within_reach(measured: FunctionMeasurement) -> bool:
    """Whether it pushes away from the reference at a distance tokens can reach."""
    if measured.departure is None or measured.extremes is None or measured.extremes.cancels_at:
        return False
    return _is_within_reach(measured.departure.reverses_at)


def _describe_value(measured: FunctionMeasurement) -> str:
    if measured.value == "zero":
        return "zero"
    if measured.value is None and _has_reverse_kl_gradient(measured):
        return "not informative: log k1 or k3 as well"
    if measured.value is None:
        low, high = measured.value_to_kl
        return f"no known quantity; it was {low:.2f} to {high:.2f} times KL(policy || reference)"
    return _format_factor(measured.value_scale) + KNOWN_VALUES[measured.value]


def _format_factor(scale: float) -> str:
    if _is_one(scale):
        return ""
    return "minus " if _is_one(-scale) else f"{scale:.4g} times "


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
        unknown = "Its gradient is not that of a KL that klinic knows."
        similar_term = measured.acts_like
        return (
            f"{unknown} Close to the reference it pulls like {similar_term}."
            if similar_term
            else unknown
        )
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


def _describe_numerics(measured: FunctionMeasurement) -> list[str]:
    extremes, sentences = measured.extremes, _describe_precision(measured)
    if extremes is None or measured.detached:
        return sentences
    if extremes.saturates_at:
        sentences.append(
            f"It has a dead zone: no gradient for {extremes.saturates_at} (d = logp_ref - logp). "
            "The tokens farthest from the reference get no gradient."
        )
    if measured.departure is not None and _is_departure_new(
        measured.departure.departs_at, extremes
    ):
        consequence = (
            "pushes the policy away" if _reverses_within_reach(measured) else "has another gradient"
        )
        sentences.append(
            "That gradient has a limited range: for "
            f"{measured.departure.departs_at} it {consequence}."
        )
    if extremes.cancels_at:
        sentences.append(
            f"In float32 autograd subtracts two large numbers: by cancellation the gradient is off "
            f"by more than 1% for {extremes.cancels_at}, and zero farther out."
        )
    if extremes.overflows_at:
        sentences.append(f"In float32 it overflows for {extremes.overflows_at}.")
    if extremes.imprecise_below is not None and extremes.imprecise_below > 1e-4:
        sentences.append(
            f"Its float32 value is off by more than 1% for |d| below "
            f"{extremes.imprecise_below:.1g}: use expm1."
        )
    return sentences


def _describe_precision(measured: FunctionMeasurement) -> list[str]:
    if measured.precision == "float64":
        return []
    if measured.precision in HALF_DTYPES:
        return [f"It computes in {measured.precision}, too coarse for log-ratios: use float32."]
    return [f"It computes in {measured.precision}, even on float64 inputs."]


def _is_departure_new(at: SideLimits, extremes: Extremes) -> bool:
    """Whether a departure is not explained by a reported dead zone or cancellation."""
    return bool(at) and not (extremes.saturates_at or extremes.cancels_at)


def _recommend_action(measured: FunctionMeasurement, verdict: Verdict) -> list[str]:
    """Return the recommended action, in one or two sentences."""
    if verdict == "correct":
        return [_recommend_keeping(measured)]
    if verdict == "conditional" and _has_reverse_kl_gradient(measured):
        repair = _recommend_repair(measured)
        if repair:
            return repair
    sentences = []
    if measured.as_reward.target == "reverse_sequence" and measured.as_reward.scale > 0:
        sentences.append(
            "Detached and used as a cost in the reward it would be right, after the advantages are "
            "normalised (the estimator `k1_reward`)."
        )
    if (
        measured.value == "kl"
        and measured.value_scale > 0
        and not _has_reverse_kl_gradient(measured)
    ):
        sentences.append("Use it as a metric, not as a loss.")
    if "logits" in measured.roles.values():
        return [
            *sentences,
            "Use the estimator `exact`: sum over the vocabulary of p (log p - log ref).",
        ]
    return [*sentences, USE_UNBIASED]


def _has_reverse_kl_gradient(measured: FunctionMeasurement) -> bool:
    return measured.gradient.target in REVERSE_KL_GRADIENTS


def _recommend_keeping(measured: FunctionMeasurement) -> str:
    if measured.off_policy is not None or "logits" in measured.roles.values():
        return "Nothing needs to change."
    return (
        "Nothing needs to change while completions come from the policy itself; on those of an "
        "older one, multiply it by the detached ratio exp(logp - logp_old)."
    )


def _recommend_repair(measured: FunctionMeasurement) -> list[str]:
    """Return the fix for a gradient that is right except for a factor or a missing ratio."""
    scale = measured.gradient.scale
    if abs(scale * COMPLETION_LENGTH - 1) < 1e-3:
        return [
            "The factor is one over the number of tokens: it takes a mean over the completion, "
            "which no factor undoes when lengths differ. Return the KL of each token, or their sum."
        ]
    if abs(scale * measured.num_completions - 1) < 1e-3:
        return ["The factor is one over the batch: return the KL of each token, before any mean."]
    if not _is_one(scale):
        return [f"Divide it by {scale:.4g}; otherwise the factor multiplies the KL coefficient."]
    if _fails_off_policy(measured):
        return [
            "On completions of an older policy its gradient is not one that klinic knows, although "
            "it takes logp_old.",
            USE_UNBIASED,
        ]
    return []
