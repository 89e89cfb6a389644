"""Describes where the identified gradient of a user's function ends.

Distances, rare tokens, float32, length, mask, batch, vocabulary, and completions of an older
policy.
"""

import re

from klinic.verify.extremes import Extremes, SideLimits
from klinic.verify.function import FailedCheck, FunctionMeasurement
from klinic.verify.gradient_range import REACHABLE_DISTANCE, Departure
from klinic.verify.ratio_range import Form, RatioRange
from klinic.verify.recommendation import has_reverse_kl_gradient
from klinic.verify.vocabulary import MAX_GRADIENT_ERROR, VOCAB_SIZES, VocabularyMeasurement

MAX_LENGTH_ERROR, MAX_LENGTH_ERROR_IN_FLOAT32 = 1e-6, 1e-3
DISTANCE = re.compile(r"d [<>] -?\d+\.\d+(?: and d < -?\d+\.\d+)?|\|d\| below \d[\de.-]*\d")
HALF_DTYPES = {"float16", "bfloat16"}
FAILED_CHECK_SENTENCES: dict[FailedCheck, str] = {
    "far_reference": "On tokens that the policy samples and the reference finds up to 60 nats less "
    "likely, its gradient is another one.",
    "mask": "With completions of different lengths it is another one: padded tokens enter it, or "
    "it divides by the length.",
    "mask_holes": "With masked tokens between others, as those of a tool, it is another one: it "
    "reads the mask as a length, or masked tokens enter it.",
    "long_rows": "On completions of 1,100 tokens it is another one: it depends on the length.",
    "rare_tokens": "In rows with rare tokens (log-probs down to -60), in float64 or float32, it is "
    "another one.",
    "batch": "It depends on the other completions of the batch, and with two of them it is another "
    "one: the difference shrinks as the batch grows.",
}
FORM_SENTENCES: dict[Form, str] = {
    "token": "the token ratio: right for the tokens, at the prefixes that the older policy visits",
    "sequence": "sequence importance sampling: the gradient for completions of the policy itself",
    "per_decision": "per-decision importance sampling: the gradient for completions of the policy "
    "itself",
    "prefix": "the ratio of each prefix: the gradient at the prefixes of the policy itself",
}


def breaks_within_reach(measured: FunctionMeasurement) -> bool:
    """Whether float32 or a dead zone breaks the gradient at a distance tokens can reach."""
    if measured.precision in HALF_DTYPES:
        return True
    departures = (measured.departure, measured.departure_in_float32)
    if any(departure is not None and departure.is_within_reach for departure in departures):
        return True
    extremes = measured.extremes
    if extremes is None:
        return False
    limits = [extremes.saturates_at, extremes.cancels_at, extremes.overflows_at]
    return any(sides.reached_within(REACHABLE_DISTANCE) for sides in limits)


def reverses_within_reach(measured: FunctionMeasurement) -> bool:
    """Whether it pushes away from the reference at a distance tokens can reach."""
    if measured.departure is None:
        return False
    if measured.extremes is not None and measured.extremes.cancels_at:
        return False
    return measured.departure.reverses_at.reached_within(REACHABLE_DISTANCE)


def describe_limits(measured: FunctionMeasurement) -> list[str]:
    """Return a sentence for each limit of the gradient."""
    sentences = _describe_precision(measured)
    if measured.detached:
        return sentences
    sentences += _describe_distances(measured)
    explained = bool(sentences)
    for departure, prefix in (
        (measured.departure, "It"),
        (measured.departure_in_float32, "In float32 it"),
    ):
        described = [] if departure is None else _describe_departure(departure, prefix)
        if described:
            sentences += described
            explained = True
            break  # float32 departs at least where float64 does
    if measured.vocabulary is not None:
        sentences += _describe_vocabulary(measured, measured.vocabulary)
        explained = explained or bool(sentences)
    for check in measured.failed_checks:
        if check != "far_reference" or not explained:
            sentences.append(FAILED_CHECK_SENTENCES[check])
    return sentences


def needs_sum(measured: FunctionMeasurement) -> bool:
    """Whether a mean over each completion's own length changes its gradient."""
    own_length = measured.own_length
    is_coarse = measured.precision != "float64"
    limit = MAX_LENGTH_ERROR_IN_FLOAT32 if is_coarse else MAX_LENGTH_ERROR
    return own_length is not None and not own_length.error < limit


def describe_own_length(measured: FunctionMeasurement) -> list[str]:
    """Describe the effect of a mean over each completion's own length."""
    own_length = measured.own_length
    if own_length is None or measured.detached or not needs_sum(measured):
        return []
    push = own_length.length_push
    effect = "its gradient is another one"
    if push is not None:
        also = "" if measured.gradient.target == "zero" else "also "
        effect = f"it {also}pushes towards {'longer' if push > 0 else 'shorter'} completions"
    return [
        "This holds where tokens are summed, or divided by a constant; in a mean over each "
        f"completion's own length {effect}."
    ]


def describe_off_policy(measured: FunctionMeasurement) -> list[str]:
    """Describe the importance sampling of a function that takes `logp_old`."""
    off_policy = measured.off_policy
    if off_policy is None or off_policy.form is None or not has_reverse_kl_gradient(measured):
        return []
    if measured.vocabulary is not None:
        return [
            "On completions of an older policy it needs no ratio: it is right at the prefixes that "
            "the older policy visits."
        ]
    sentence = f"On completions of an older policy it is {FORM_SENTENCES[off_policy.form]}."
    ratio_range = off_policy.ratio_range
    return [sentence] if ratio_range is None else [sentence, *_describe_ratios(ratio_range)]


def _describe_ratios(ratio_range: RatioRange) -> list[str]:
    """Describe where the weight is not the ratio of policy to sampler."""
    sentences = []
    if ratio_range.cap is not None:
        sentences.append(
            f"The ratio is held at {ratio_range.cap:.4g}: above it the pull is too small, and its "
            "noise bounded."
        )
    if ratio_range.masked_above is not None:
        sentences.append(
            f"Tokens with a ratio above {ratio_range.masked_above:.4g} get no gradient: the policy "
            "is not pulled back where it moved farthest from the sampler."
        )
    if ratio_range.reverses_at is not None:
        sentences.append(
            f"From a ratio of {ratio_range.reverses_at:.4g} on, the weight has the wrong sign: it "
            "pushes the policy away from the reference."
        )
        return sentences
    departs = (("above", ratio_range.departs_above), ("below", ratio_range.departs_below))
    limits = " and ".join(f"{side} {ratio:.4g}" for side, ratio in departs if ratio is not None)
    if limits:
        sentences.append(
            f"For ratios {limits} its gradient is another one: the weight is neither the ratio nor "
            "a cap of it."
        )
    return sentences


def _describe_distances(measured: FunctionMeasurement) -> list[str]:
    return _define_distance(_distance_sentences(measured))


def _define_distance(sentences: list[str]) -> list[str]:
    """Say what d is where it occurs first."""
    for index, sentence in enumerate(sentences):
        defined, was_found = DISTANCE.subn(r"\g<0> (d = logp_ref - logp)", sentence, count=1)
        if was_found:
            return [*sentences[:index], defined, *sentences[index + 1 :]]
    return sentences


def _distance_sentences(measured: FunctionMeasurement) -> list[str]:
    extremes, departure = measured.extremes, measured.departure
    if extremes is None:
        has_limit = departure is not None and departure.departs_at
        return [_describe_limited_range(measured, departure)] if departure and has_limit else []
    sentences = []
    if extremes.saturates_at:
        sentences.append(
            f"It has a dead zone: no gradient for {extremes.saturates_at}. "
            "The tokens farthest from the reference get no gradient."
        )
    if measured.departure is not None and _is_departure_new(
        measured.departure.departs_at, extremes
    ):
        sentences.append(_describe_limited_range(measured, measured.departure))
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


def _describe_limited_range(measured: FunctionMeasurement, departure: Departure) -> str:
    consequence = (
        "pushes the policy away" if reverses_within_reach(measured) else "has another gradient"
    )
    return f"That gradient has a limited range: for {departure.departs_at} it {consequence}."


def _describe_departure(departure: Departure, prefix: str) -> list[str]:
    """Describe the departures other than the distance on the line."""
    sentences = []
    if departure.both_rare_below is not None:
        sentences.append(
            f"{prefix} has another gradient on tokens that both policies find rare: where both "
            f"log-probs are below {departure.both_rare_below:.1f}."
        )
    if departure.certain_above is not None:
        sentences.append(
            f"{prefix} has another gradient on tokens that are almost certain: where a log-prob is "
            f"above {departure.certain_above:.1g}."
        )
    if departure.near_zero_below is not None:
        sentences.append(
            f"{prefix} has another gradient next to the reference, for |d| below "
            f"{departure.near_zero_below:.1g}."
        )
    if departure.next_to_far_tokens:
        sentences.append(
            f"{prefix} has another gradient in completions whose other tokens are 30 nats from the "
            "reference."
        )
    return sentences


def _describe_vocabulary(
    measured: FunctionMeasurement, vocabulary: VocabularyMeasurement
) -> list[str]:
    if not has_reverse_kl_gradient(measured):
        return []
    sentences = []
    size, error = max(vocabulary.error_by_size.items(), key=lambda entry: entry[1])
    if error > MAX_GRADIENT_ERROR and not vocabulary.depends_on_size:
        sentences.append(f"At a vocabulary of {size} its gradient is off by {error:.2g}.")
    below, prefix = vocabulary.departs_below, "It"
    if below is None:
        below, prefix = vocabulary.departs_in_float32_below, "In float32 it"
    if below is not None:
        sentences.append(
            f"{prefix} has another gradient where a token's log-prob, under policy or reference, "
            f"is {below:.4g} or less."
        )
    if not vocabulary.is_finite_if_certain:
        sentences.append(
            "In float32 its gradient is NaN where the likeliest tokens have all the probability: "
            "compute the rest from log-probs, not as 1 minus a sum."
        )
    if not vocabulary.is_finite_in_float32:
        sentences.append(
            "In float32 its value or gradient is NaN or infinite at vocabularies of "
            f"{min(VOCAB_SIZES)} to {max(VOCAB_SIZES)} tokens."
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
