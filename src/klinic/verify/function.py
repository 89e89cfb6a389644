"""Measures the mean value and the expected gradient of a user's KL function.

Evaluates f(logp, logp_ref) in toy worlds like those of klinic's own terms. Its mean value and mean
gradient are identified only if they fit in every world. An identified gradient is then checked
beyond the worlds: far from the reference, for rare tokens, in float32, on longer rows, with a mask,
in other batches, and for functions of logits at vocabularies of up to 151,936 tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from klinic.errors import FunctionError, first_line
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.verify.estimators import WorldSet, one_token_rows
from klinic.verify.expectation import EnumeratedPairs, GradientMoments
from klinic.verify.extremes import Extremes, TokenFunction, pull_in_float64, scan_term
from klinic.verify.gradient_range import EARLIER_PULLS, NEIGHBOUR_LOGP, Departure, PullScan
from klinic.verify.identify import (
    TOLERANCE,
    GradientIdentity,
    fits_identity,
    identify_gradient,
    nearest_target,
)
from klinic.verify.known_values import identify_value, known_quantities
from klinic.verify.loading import Role, UserFunction
from klinic.verify.off_policy import (
    LARGE_DRIFT,
    SLIGHT_DRIFT,
    OffPolicyMeasurement,
    identify_off_policy,
)
from klinic.verify.own_length import OwnLengthMeasurement, measure_own_length
from klinic.verify.row_pulls import evaluate_rows
from klinic.verify.row_structure import depends_on_batch, holds_on_long_rows, holds_with_holes
from klinic.verify.sampled_row import holds_for_rare_tokens
from klinic.verify.user_worlds import (
    as_reward_terms,
    early_end_set,
    evaluate_pairs,
    far_reference_pair_set,
    far_reference_set,
    function_terms,
    off_policy_set,
    on_policy_set,
    pair_set,
    term_moments,
)
from klinic.verify.vocabulary import VocabularyMeasurement, ignores_tokens, measure_vocabulary

# Tolerance of the identification, by the dtype that the function computes in.
TOLERANCES = {
    torch.float64: TOLERANCE,
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
SCANNED_DTYPES = (torch.float64, torch.float32)  # a half dtype is too coarse in any case
COMPARED_DISTANCE = 1.0  # largest |d| at which a function's pull is compared with the known terms
NEARLY = 0.01  # a gradient this near to a target, relative to itself, is named as an approximation

FailedCheck = Literal["far_reference", "mask", "mask_holes", "long_rows", "rare_tokens", "batch"]
# A function may treat completions separately, or mix those of a batch; identified pair by pair, or
# only in a large batch.
BatchUse = Literal["separate", "unbiased", "biased"]


@dataclass(frozen=True, kw_only=True)
class FunctionMeasurement:
    """Measurements of a user's function by enumeration and scanning."""

    name: str
    roles: dict[str, Role]
    """The role of each of its arguments."""
    precision: str
    """The dtype of its result on float64 inputs."""
    value: str | None
    """A key of KNOWN_VALUES, `zero`, or None without a match."""
    value_scale: float
    value_to_kl: tuple[float, float]
    """The smallest and largest ratio of the mean value to the KL over the worlds."""
    gradient: GradientIdentity
    as_reward: GradientIdentity
    """The gradient when detached and used as a cost in the reward of the completion."""
    nearly: GradientIdentity | None
    """The nearest target if no target fits, but one is within 1%."""
    off_policy: OffPolicyMeasurement | None
    """Only for functions that take `logp_old`."""
    detached: bool
    acts_like: str | None
    """The published term with the same pull near the reference."""
    extremes: Extremes | None
    """None for functions of logits, and for those that mix the completions of a batch."""
    departure: Departure | None
    """Where its pull leaves the identified gradient, beyond the range of the worlds."""
    departure_in_float32: Departure | None
    """The same for float32 inputs, of a function that computes in the dtype of its inputs."""
    vocabulary: VocabularyMeasurement | None
    """Only for functions of logits alone."""
    failed_checks: tuple[FailedCheck, ...]
    """Where else the identified gradient does not hold."""
    own_length: OwnLengthMeasurement | None
    """Only for functions of sampled tokens with one value per token."""
    per_completion: bool
    """Whether it returns one value per completion, instead of one per token."""
    num_completions: int
    """Completions per call."""


def measure(function: UserFunction) -> FunctionMeasurement:
    """Measure a function in every world, and beyond."""
    try:
        return _measure(function)
    except RuntimeError as error:  # autograd fails, for example after an in-place operation
        raise FunctionError(
            f"{function.name} cannot be differentiated: {first_line(error)} A loss that uses it "
            "would fail in the same way."
        ) from error


def _measure(function: UserFunction) -> FunctionMeasurement:
    needs_tokens = not (function.takes_logits and ignores_tokens(function))
    vocabulary = None if needs_tokens else measure_vocabulary(function)
    try:
        values = _validated_values(function, on_policy_set().world_pairs[-1])
    except FunctionError:
        # a top k of 64 fails on the small vocabulary of the worlds, not on a large one
        if vocabulary is None or math.isnan(max(vocabulary.error_by_size.values())):
            raise
        return _measurement_of_rows(function, vocabulary)
    dtype = _compute_dtype(function, values)
    enumerated, batch = _enumerate_function(function, dtype)
    gradient = enumerated.gradient
    if vocabulary is not None and vocabulary.is_identified(dtype):
        gradient = vocabulary.identity
    departures = _find_departures(function, gradient, dtype, batch)
    return FunctionMeasurement(
        name=function.name,
        roles=function.roles,
        precision=str(dtype).removeprefix("torch."),
        value=enumerated.value,
        value_scale=enumerated.value_scale,
        value_to_kl=enumerated.value_to_kl,
        gradient=gradient,
        as_reward=enumerated.as_reward,
        nearly=enumerated.nearly if gradient.target is None else None,
        off_policy=_measure_off_policy(function, dtype) if function.takes_logp_old else None,
        detached=not values.requires_grad or enumerated.has_no_gradient,
        acts_like=None
        if function.takes_logits
        else _term_with_equal_pull(function, TOLERANCES[dtype]),
        extremes=_scan_extremes(function, batch),
        departure=departures[0],
        departure_in_float32=departures[1],
        vocabulary=vocabulary,
        failed_checks=_failed_checks(function, gradient, dtype, needs_tokens=needs_tokens)
        if batch == "separate"
        else _failed_checks_of_pairs(function, gradient, dtype, batch),
        own_length=_measure_own_length(function, gradient)
        if batch == "separate" and values.ndim == 2 and vocabulary is None
        else None,
        per_completion=values.ndim == 1,
        num_completions=len(values),
    )


def _measurement_of_rows(
    function: UserFunction, vocabulary: VocabularyMeasurement
) -> FunctionMeasurement:
    """Return the measurement of a function of logits that needs a large vocabulary."""
    unknown = GradientIdentity(target=None, scale=1.0, error=math.inf)
    is_identified = vocabulary.is_identified(torch.float64)
    value = "bucket" if vocabulary.kind == "bucket" else "kl"
    return FunctionMeasurement(
        name=function.name,
        roles=function.roles,
        precision="float64",
        value=value if is_identified else None,
        value_scale=vocabulary.scale,
        value_to_kl=(math.nan, math.nan),
        gradient=vocabulary.identity if is_identified else unknown,
        as_reward=unknown,
        nearly=None,
        off_policy=None,
        detached=False,
        acts_like=None,
        extremes=None,
        departure=None,
        departure_in_float32=None,
        vocabulary=vocabulary,
        failed_checks=(),
        own_length=None,
        per_completion=False,
        num_completions=0,
    )


@dataclass(frozen=True, kw_only=True)
class _EnumeratedFunction:
    """The moments of a function in the worlds on policy, identified."""

    value: str | None
    value_scale: float
    value_to_kl: tuple[float, float]
    gradient: GradientIdentity
    nearly: GradientIdentity | None
    as_reward: GradientIdentity
    has_no_gradient: bool


def _enumerate_function(
    function: UserFunction, dtype: torch.dtype
) -> tuple[_EnumeratedFunction, BatchUse]:
    """Identify the function; pair by pair, if it mixes the completions of a batch."""
    enumerated = _enumerate_worlds(function, dtype, on_policy_set())
    if dtype not in SCANNED_DTYPES or not depends_on_batch(function, dtype):
        return enumerated, "separate"
    by_pair = _enumerate_worlds(function, dtype, pair_set(), by_pair=True)
    if by_pair.gradient.target is None:
        return enumerated, "biased"
    return by_pair, "unbiased"


def _enumerate_worlds(
    function: UserFunction, dtype: torch.dtype, worlds: WorldSet, *, by_pair: bool = False
) -> _EnumeratedFunction:
    tolerance = TOLERANCES[dtype]
    terms = function_terms(function, worlds.world_pairs, by_pair=by_pair)
    moments = term_moments(terms, worlds.world_pairs)
    rewards = term_moments(as_reward_terms(terms, worlds.world_pairs), worlds.world_pairs)
    quantities = [known_quantities(world) for world in worlds.worlds]
    value, scale = identify_value([m.value for m in moments], quantities, tolerance)
    kl_ratios = [m.value / exact["kl"] for m, exact in zip(moments, quantities, strict=True)]
    nearest = nearest_target(moments, worlds.targets)
    return _EnumeratedFunction(
        value=value,
        value_scale=scale,
        value_to_kl=(min(kl_ratios), max(kl_ratios)),
        gradient=identify_gradient(moments, worlds.targets, tolerance=tolerance),
        nearly=nearest if nearest.error < NEARLY else None,
        as_reward=identify_gradient(rewards, worlds.targets, tolerance=tolerance),
        has_no_gradient=all(moment.gradient_rms == 0 for moment in moments),
    )


def _validated_values(function: UserFunction, pairs: EnumeratedPairs) -> Tensor:
    """Return the values of two equal calls; raise on non-finite, random or integer results."""
    first, second = (evaluate_pairs(function, pairs) for _ in range(2))
    if not bool(first.isfinite().all()):
        num_non_finite = int((~first.isfinite()).sum())
        raise FunctionError(
            f"{function.name} returned NaN or infinity for "
            f"{num_non_finite} of {first.numel()} ordinary "
            "tokens. Fix this first: a non-finite value has no mean to identify."
        )
    if not torch.equal(first, second):
        raise FunctionError(
            f"{function.name} returned different values for the same inputs: it is random or keeps "
            "state between calls. Make it deterministic to verify it."
        )
    if first.dtype not in TOLERANCES:
        raise FunctionError(
            f"{function.name} returned {first.dtype}: a KL needs a floating-point dtype."
        )
    return first


def _compute_dtype(function: UserFunction, values: Tensor) -> torch.dtype:
    """Return the coarsest dtype to which rounded inputs give the same values.

    A function may cast its inputs and return the dtype that it got.
    """
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounded = evaluate_pairs(function, on_policy_set().world_pairs[-1], rounded_to=dtype)
        if torch.equal(rounded, values) and not bool((values == values.flatten()[0]).all()):
            return dtype
    return values.dtype


def _find_departures(
    function: UserFunction, gradient: GradientIdentity, dtype: torch.dtype, batch: BatchUse
) -> tuple[Departure | None, Departure | None]:
    """Scan with float64 inputs, and with float32 ones if the function computes in float64."""
    # a biased function is conditional in any case
    if dtype not in SCANNED_DTYPES or function.takes_logits or batch == "biased":
        return None, None
    departure, in_float32 = (
        PullScan(
            function=function,
            identity=gradient,
            input_dtype=inputs,
            compute_dtype=computes,
            in_pairs=batch == "unbiased",
        ).find_departure()
        for inputs, computes in ((torch.float64, dtype), (torch.float32, torch.float32))
    )
    return departure, in_float32 if dtype == torch.float64 else None


def _scan_extremes(function: UserFunction, batch: BatchUse) -> Extremes | None:
    """Scan one token; one scan is one batch, and means nothing for a function that mixes them."""
    if function.takes_logits or batch == "unbiased":
        return None
    return scan_term(_token_function(function))


def _measure_off_policy(function: UserFunction, dtype: torch.dtype) -> OffPolicyMeasurement:
    large, slight = (
        (_moments(function, worlds), worlds.targets)
        for worlds in (off_policy_set(LARGE_DRIFT), off_policy_set(SLIGHT_DRIFT))
    )
    return identify_off_policy(
        function, large, slight, tolerance=TOLERANCES[dtype], compute_dtype=dtype
    )


def _measure_own_length(
    function: UserFunction, gradient: GradientIdentity
) -> OwnLengthMeasurement | None:
    """Compare sums with averages, for a token-level gradient or none."""
    if gradient.target not in {"reverse_token", "zero"}:
        return None
    measured = measure_own_length(function, gradient.scale)
    # a baseline from whole rows of logits changes the effect of the length, and is no such push
    return None if function.takes_logits and measured.length_push is None else measured


def _moments(
    function: UserFunction, worlds: WorldSet, *, by_pair: bool = False
) -> Sequence[GradientMoments]:
    terms = function_terms(function, worlds.world_pairs, by_pair=by_pair)
    return term_moments(terms, worlds.world_pairs)


def _failed_checks(
    function: UserFunction, gradient: GradientIdentity, dtype: torch.dtype, *, needs_tokens: bool
) -> tuple[FailedCheck, ...]:
    """Return the checks beyond the worlds at which an identified gradient fails."""
    if gradient.target not in EARLIER_PULLS or dtype not in SCANNED_DTYPES:
        return ()
    failed: list[FailedCheck] = []
    if not _holds_in(function, gradient, dtype, far_reference_set()):
        failed.append("far_reference")
    if function.takes_mask and not _holds_in(function, gradient, dtype, early_end_set()):
        failed.append("mask")
    if function.takes_mask and not holds_with_holes(function, dtype):
        failed.append("mask_holes")
    if not function.takes_logits and not holds_on_long_rows(function, gradient, dtype):
        failed.append("long_rows")
    if (
        function.takes_logits
        and needs_tokens
        and not all(
            holds_for_rare_tokens(function, gradient.scale, inputs) for inputs in SCANNED_DTYPES
        )
    ):
        failed.append("rare_tokens")
    return tuple(failed)


def _failed_checks_of_pairs(
    function: UserFunction, gradient: GradientIdentity, dtype: torch.dtype, batch: BatchUse
) -> tuple[FailedCheck, ...]:
    """Return the same for a function that mixes the completions of a batch."""
    if batch == "biased":
        return ("batch",)
    holds = _holds_in(function, gradient, dtype, far_reference_pair_set(), by_pair=True)
    return () if holds else ("far_reference",)


def _holds_in(
    function: UserFunction,
    gradient: GradientIdentity,
    dtype: torch.dtype,
    worlds: WorldSet,
    *,
    by_pair: bool = False,
) -> bool:
    moments = _moments(function, worlds, by_pair=by_pair)
    return fits_identity(gradient, moments, worlds.targets, tolerance=100 * TOLERANCES[dtype])


def _token_function(function: UserFunction) -> TokenFunction:
    """Return the function of one token, between two neighbours at the reference."""

    def evaluate_token(logp: Tensor, logp_ref: Tensor) -> Tensor:
        neighbour = torch.full_like(logp_ref, NEIGHBOUR_LOGP)
        rows, rows_ref = (
            torch.stack([neighbour, scores, neighbour], dim=-1) for scores in (logp, logp_ref)
        )
        values = evaluate_rows(function, rows, rows_ref)
        return values[:, 1] if values.ndim == 2 else values

    return evaluate_token


def _term_with_equal_pull(function: UserFunction, tolerance: float) -> str | None:
    """Return the published term with the same pull on each token near the reference."""
    d = torch.linspace(-COMPARED_DISTANCE, COMPARED_DISTANCE, 101, dtype=torch.float64)
    d = d[d.abs() > 1e-3]  # |k1| is not differentiable at 0
    user_pull = pull_in_float64(_token_function(function), d)
    for name in ("k1", "k2", "k3", "k3_reversed", "abs"):
        term = ESTIMATORS[name].term
        term_pull = pull_in_float64(lambda logp, ref: term(one_token_rows(logp, ref)), d)  # noqa: B023
        if float((user_pull - term_pull).abs().max()) < tolerance:
            return name
    return None
