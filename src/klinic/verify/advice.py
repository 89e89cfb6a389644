"""From what was measured of a user's function to a verdict and one paragraph.

The verdict is about the function added to a loss:

    correct      its gradient is that of KL(policy || reference) wherever tokens can land
    conditional  it is so only near the reference, up to a factor, or while float32 holds
    wrong        it is not: no pull, the wrong way, or something that is not a KL
"""

from dataclasses import dataclass

from klinic.verify.estimators import Verdict
from klinic.verify.function import VALUES, Measured

REACHED = 60.0  # nats: a token that a policy gave up can be this far from the reference

USE = (
    "Use the estimator `unbiased`, that is `(ratio * (logp - logp_ref)).detach() * logp` with "
    "ratio = exp(logp - logp_sampler) held at 2: the right gradient at any distance."
)
IS_RIGHT = {
    "reverse_token": "the gradient of KL(policy || reference), token by token",
    "reverse_sequence": "the whole gradient of KL(policy || reference) between completions",
    "bucket_token": "the gradient of a lower bound of KL(policy || reference)",
}
IS_FORWARD = {
    "forward_token": "that of KL(reference || policy), with a weight of exp(d) on each token",
    "forward_sequence": "that of KL(reference || policy) between completions",
}
IS_WRONG = {
    "half_chi_square": "half that of chi-square, which grows like exp(k1) where the policy "
    "likes a token more than the reference does",
    "sign_token": "sign(k1) grad logp: as strong next to the reference as far from it, so it does "
    "not vanish where policy and reference agree",
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
    if found.target in IS_RIGHT and found.scale > 0:
        sound = abs(found.scale - 1) < 1e-6 and not _breaks(measured)
        return "correct" if sound else "conditional"
    if found.target in IS_FORWARD and found.scale > 0:
        return "conditional"
    return "wrong"


def _breaks(measured: Measured) -> bool:
    """Whether float32 or a dead zone takes the gradient away at a distance tokens can reach."""
    extremes = measured.extremes
    if extremes is None:
        return False
    places = (extremes.saturates_at, extremes.cancels_at, extremes.overflows_at)
    edges = [edge for sides in places for edge in (sides.above, sides.below)]
    return any(edge is not None and abs(edge) <= REACHED for edge in edges)


def _value(measured: Measured) -> str:
    if measured.value == "zero":
        return "zero"
    if measured.value is None:
        low, high = measured.value_to_kl
        return f"no known quantity; it was {low:.2f} to {high:.2f} times KL(policy || reference)"
    return _times(measured.value_scale) + VALUES[measured.value]


def _times(scale: float) -> str:
    if abs(scale - 1) < 1e-6:
        return ""
    return "minus " if abs(scale + 1) < 1e-6 else f"{scale:.4g} times "


def _gradient(measured: Measured) -> str:
    found = measured.gradient
    if measured.detached:
        return "No gradient flows through it: added to a loss it does nothing."
    if found.target == "zero":
        return (
            "Its gradient averages to zero: added to a loss it pulls nowhere and adds only noise, "
            "and on completions of an older policy it pushes away from what was sampled."
        )
    known = IS_RIGHT | IS_FORWARD | IS_WRONG
    if found.target is None or found.target not in known:
        like = f" Close to the reference it pulls like {measured.acts_like}." * bool(
            measured.acts_like
        )
        return "Its gradient is not that of any KL." + like
    if found.scale < 0:
        return (
            f"It has the wrong sign: its gradient is {_times(found.scale)}{known[found.target]}. "
            "A trainer that minimises it pushes the policy away from the reference."
        )
    if found.target in IS_FORWARD:
        return (
            f"But its gradient is {_times(found.scale)}{known[found.target]}: right to first order "
            "next to the reference, a different objective with a heavy tail far from it."
        )
    return f"Added to a loss its gradient is {_times(found.scale)}{known[found.target]}."


def _numerics(measured: Measured) -> list[str]:
    extremes = measured.extremes
    if extremes is None or measured.detached:
        return []
    said = []
    if extremes.saturates_at:
        said.append(
            f"It has a dead zone: no gradient for {extremes.saturates_at} (d = logp_ref - logp). "
            "The tokens farthest from the reference are not pulled back at all."
        )
    if extremes.cancels_at:
        said.append(
            f"In float32 autograd subtracts two large numbers: by cancellation the gradient is off "
            f"by more than 1% for {extremes.cancels_at}, and soon zero."
        )
    if extremes.overflows_at:
        said.append(f"In float32 it overflows for {extremes.overflows_at}.")
    if extremes.imprecise_below is not None and extremes.imprecise_below > 1e-4:
        said.append(
            f"Its float32 value is off by more than 1% for |d| below "
            f"{extremes.imprecise_below:.1g}: use expm1."
        )
    return said


def _instead(measured: Measured, verdict: Verdict) -> list[str]:
    if verdict == "correct":
        return ["Nothing needs to change."]
    said = []
    if measured.as_reward.target == "reverse_sequence" and measured.as_reward.scale > 0:
        said.append(
            "Detached and used as a cost in the reward it would be right, after the advantages are "
            "normalised (the estimator `k1_reward`)."
        )
    if measured.value == "kl" and measured.gradient.target not in IS_RIGHT:
        said.append("Keep it as a number to log, not as a loss.")
    scale = measured.gradient.scale
    if measured.gradient.target in IS_RIGHT and scale > 0 and abs(scale - 1) > 1e-6:
        said.append(f"Divide it by {scale:.4g}, or the coefficient means something else.")
    return [*said, USE]
