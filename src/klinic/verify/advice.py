"""Turns the measurements of a user's function into a verdict and one paragraph of advice.

The verdict is about the function as a term of the loss:

    correct      its gradient is that of KL(policy || reference) at every distance tokens reach
    conditional  only near the reference, up to a factor, or within the range of float32
    wrong        no gradient, the wrong sign, or not the gradient of a KL
"""

from dataclasses import dataclass

from klinic.verify.estimators import OFF_POLICY, Verdict
from klinic.verify.extremes import Extremes, Sides
from klinic.verify.function import VALUES, Measured
from klinic.verify.world import LENGTH

HALF = {"float16", "bfloat16"}
REACHED = 60.0  # nats: log-prob distance to the reference that abandoned tokens can reach

USE = (
    "Use the estimator `unbiased`: `(ratio * (logp - logp_ref)).detach() * logp` with ratio = "
    "exp(logp - logp_old).clamp(max=2), logp_old being that of the sampler."
)
PUSHES = {
    "k1": " On completions of an older policy it pushes away from the sampled tokens.",
}
IS_RIGHT = {
    "reverse_token": "the gradient of KL(policy || reference), token by token",
    "reverse_sequence": "the whole gradient of KL(policy || reference) between completions",
    "bucket_token": "the gradient of a lower bound of KL(policy || reference)",
}
IS_FORWARD = {
    "forward_token": "that of KL(reference || policy)",
    "forward_sequence": "that of KL(reference || policy) between completions",
}
IS_WRONG = {
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


def judge(measured: Measured) -> Judgement:
    """Return the verdict on a measured function."""
    value = _value(measured)
    sentences = [f"Its mean is {value}.", _gradient(measured), *_numerics(measured)]
    verdict = _verdict(measured)
    return Judgement(
        verdict=verdict,
        value=value,
        advice=" ".join([*sentences, *_instead(measured, verdict)]),
    )


def _verdict(measured: Measured) -> Verdict:
    found = measured.gradient
    if _turns(measured):
        return "wrong"
    if found.target in IS_RIGHT and found.scale > 0:
        sound = _is_one(found.scale) and not _breaks(measured) and not _fails_off_policy(measured)
        return "correct" if sound else "conditional"
    if found.target in IS_FORWARD and found.scale > 0:
        return "conditional"
    return "wrong"


def _is_one(scale: float) -> bool:
    return abs(scale - 1) < 1e-3  # a factor of 1.001 is rounding, one of 1.04 is a coefficient


def _fails_off_policy(measured: Measured) -> bool:
    """Whether a function that takes `logp_old` does not correct for the older policy."""
    return measured.off_policy is not None and measured.off_policy.target not in OFF_POLICY


def _breaks(measured: Measured) -> bool:
    """Whether float32 or a dead zone breaks the gradient at a distance tokens can reach."""
    extremes = measured.extremes
    if measured.precision in HALF:
        return True
    if extremes is None:
        return False
    places = [extremes.saturates_at, extremes.cancels_at, extremes.overflows_at]
    if measured.departure is not None:
        places.append(measured.departure.at)
    return any(_is_reached(sides) for sides in places)


def _is_reached(sides: Sides) -> bool:
    edges = (sides.above, sides.below)
    return any(edge is not None and abs(edge) <= REACHED for edge in edges)


def _turns(measured: Measured) -> bool:
    """Whether it pushes away from the reference at a distance tokens can reach."""
    if measured.departure is None or measured.extremes is None or measured.extremes.cancels_at:
        return False
    return _is_reached(measured.departure.away)


def _value(measured: Measured) -> str:
    if measured.value == "zero":
        return "zero"
    if measured.value is None and _is_right(measured):
        return "not informative: log k1 or k3 as well"
    if measured.value is None:
        low, high = measured.value_to_kl
        return f"no known quantity; it was {low:.2f} to {high:.2f} times KL(policy || reference)"
    return _times(measured.value_scale) + VALUES[measured.value]


def _times(scale: float) -> str:
    if _is_one(scale):
        return ""
    return "minus " if _is_one(-scale) else f"{scale:.4g} times "


def _gradient(measured: Measured) -> str:
    found = measured.gradient
    if measured.detached:
        return "No gradient flows through it: added to a loss it does nothing."
    if found.target == "zero":
        return (
            "Its gradient averages to zero: added to a loss it adds nothing but noise."
            + PUSHES.get(measured.acts_like or "", "")
        )
    known = IS_RIGHT | IS_FORWARD | IS_WRONG
    if found.target is None or found.target not in known:
        unknown = "Its gradient is not that of a KL that klinic knows."
        like = measured.acts_like
        return f"{unknown} Close to the reference it pulls like {like}." if like else unknown
    if found.scale < 0:
        return (
            f"It has the wrong sign: its gradient is {_times(found.scale)}{known[found.target]}. "
            "A trainer that minimises it pushes the policy away from the reference."
        )
    if found.target in IS_FORWARD:
        return (
            f"But its gradient is {_times(found.scale)}{known[found.target]}: right to first order "
            "next to the reference, a different objective far from it"
            + (", where a token weighs exp(d)." if measured.acts_like == "k3" else ".")
        )
    return f"Added to a loss its gradient is {_times(found.scale)}{known[found.target]}."


def _numerics(measured: Measured) -> list[str]:
    extremes, said = measured.extremes, _precision(measured)
    if extremes is None or measured.detached:
        return said
    if extremes.saturates_at:
        said.append(
            f"It has a dead zone: no gradient for {extremes.saturates_at} (d = logp_ref - logp). "
            "The tokens farthest from the reference get no gradient."
        )
    if measured.departure is not None and _is_departure_new(measured.departure.at, extremes):
        turned = "pushes the policy away" if _turns(measured) else "has another gradient"
        said.append(f"That gradient has a limited range: for {measured.departure.at} it {turned}.")
    if extremes.cancels_at:
        said.append(
            f"In float32 autograd subtracts two large numbers: by cancellation the gradient is off "
            f"by more than 1% for {extremes.cancels_at}, and zero farther out."
        )
    if extremes.overflows_at:
        said.append(f"In float32 it overflows for {extremes.overflows_at}.")
    if extremes.imprecise_below is not None and extremes.imprecise_below > 1e-4:
        said.append(
            f"Its float32 value is off by more than 1% for |d| below "
            f"{extremes.imprecise_below:.1g}: use expm1."
        )
    return said


def _precision(measured: Measured) -> list[str]:
    if measured.precision == "float64":
        return []
    if measured.precision in HALF:
        return [f"It computes in {measured.precision}, too coarse for log-ratios: use float32."]
    return [f"It computes in {measured.precision}, even on float64 inputs."]


def _is_departure_new(at: Sides, extremes: Extremes) -> bool:
    """Whether a departure is not explained by a reported dead zone or cancellation."""
    return bool(at) and not (extremes.saturates_at or extremes.cancels_at)


def _instead(measured: Measured, verdict: Verdict) -> list[str]:
    """Return the recommended action, in one or two sentences."""
    if verdict == "correct":
        return [_keep(measured)]
    if verdict == "conditional" and _is_right(measured):
        mended = _mend(measured)
        if mended:
            return mended
    said = []
    if measured.as_reward.target == "reverse_sequence" and measured.as_reward.scale > 0:
        said.append(
            "Detached and used as a cost in the reward it would be right, after the advantages are "
            "normalised (the estimator `k1_reward`)."
        )
    if measured.value == "kl" and measured.value_scale > 0 and not _is_right(measured):
        said.append("Use it as a metric, not as a loss.")
    if "logits" in measured.roles.values():
        return [*said, "Use the estimator `exact`: sum over the vocabulary of p (log p - log ref)."]
    return [*said, USE]


def _is_right(measured: Measured) -> bool:
    return measured.gradient.target in IS_RIGHT


def _keep(measured: Measured) -> str:
    if measured.off_policy is not None or "logits" in measured.roles.values():
        return "Nothing needs to change."
    return (
        "Nothing needs to change while completions come from the policy itself; on those of an "
        "older one, multiply it by the detached ratio exp(logp - logp_old)."
    )


def _mend(measured: Measured) -> list[str]:
    """Return the fix for a gradient that is right except for a factor or a missing ratio."""
    scale = measured.gradient.scale
    if abs(scale * LENGTH - 1) < 1e-3:
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
            USE,
        ]
    return []
