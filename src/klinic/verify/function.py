"""Measures the mean value and the expected gradient of a user's KL function.

Evaluates f(logp, logp_ref) in toy worlds like those of klinic's own terms. Its mean value and mean
gradient are identified only if they fit in every world.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.errors import FunctionError, first_line
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.score import score_term
from klinic.verify.estimators import WorldSet, one_token_rows
from klinic.verify.expectation import EnumeratedPairs, gradient_moments
from klinic.verify.extremes import Extremes, pull_in_float64, scan_term
from klinic.verify.gradient_range import Departure, find_departure
from klinic.verify.identify import TOLERANCE, GradientIdentity, identify_gradient
from klinic.verify.loading import Role, UserFunction
from klinic.verify.targets import (
    TOP_K,
    bucketed_top_k_kl,
    forward_kl,
    half_chi_square,
    reverse_kl,
    sum_over_prefixes,
)
from klinic.verify.toy_policies import COMPLETION_LENGTH, World, make_world

# Tolerance of the identification, by the dtype that the function computes in.
TOLERANCES = {
    torch.float64: TOLERANCE,
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
COMPARED_DISTANCE = 1.0  # largest |d| at which a function's pull is compared with the known terms

# Quantities that a mean value can equal, each an exact sum, simplest first.
KNOWN_VALUES = {
    "kl": "KL(policy || reference)",
    "forward_kl": "KL(reference || policy)",
    "chi_square_minus_kl": "chi-square(policy || reference) minus the KL",
    "chi_square": "chi-square(policy || reference)",
    "bucket": f"the KL of the top {TOP_K} tokens and a rest bucket, a lower bound",
    "k2": "half the mean squared log-ratio, near the KL only while both policies are close",
    "abs": "the mean absolute log-ratio, which is not a KL",
    "exp_k1": "the mean of exp(k1) k1, a KL only if the tokens were sampled from the reference",
}


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
    off_policy: GradientIdentity | None
    """Only for functions that take `logp_old`."""
    detached: bool
    acts_like: str | None
    """The published term with the same pull near the reference."""
    extremes: Extremes | None
    """None for functions of logits or of whole completions."""
    departure: Departure | None
    """Where its pull leaves the identified gradient, beyond the range of the worlds."""
    num_completions: int
    """Completions per call."""


def measure(function: UserFunction) -> FunctionMeasurement:
    """Measure a function in every world."""
    on_policy = WorldSet.from_worlds(_rectangular_worlds(sampler_drift=0.0))
    values = _validated_values(function, on_policy.world_pairs[-1])
    try:
        return _measure_in_worlds(function, on_policy, values)
    except RuntimeError as error:  # autograd fails, for example after an in-place operation
        raise FunctionError(
            f"{function.name} cannot be differentiated: {first_line(error)} A loss that uses it "
            "would fail in the same way."
        ) from error


def _measure_in_worlds(
    function: UserFunction, on_policy: WorldSet, values: Tensor
) -> FunctionMeasurement:
    terms = [(pairs, _function_term(function, pairs)) for pairs in on_policy.world_pairs]
    term_moments = [gradient_moments(pairs, term) for pairs, term in terms]
    reward_moments = [
        gradient_moments(pairs, _as_reward_term(term, pairs)) for pairs, term in terms
    ]
    tolerance = TOLERANCES[values.dtype]
    quantities = [_known_quantities(world) for world in on_policy.worlds]
    value, scale = _identify_value([m.value for m in term_moments], quantities, tolerance)
    kl_ratios = [m.value / exact["kl"] for m, exact in zip(term_moments, quantities, strict=True)]
    per_token = not function.takes_logits and values.ndim == 2
    gradient = identify_gradient(term_moments, on_policy.targets, tolerance=tolerance)

    def token_term(logp: Tensor, logp_ref: Tensor) -> Tensor:
        return _evaluate_one_token(function, logp, logp_ref)

    return FunctionMeasurement(
        name=function.name,
        roles=function.roles,
        precision=str(values.dtype).removeprefix("torch."),
        value=value,
        value_scale=scale,
        value_to_kl=(min(kl_ratios), max(kl_ratios)),
        gradient=gradient,
        as_reward=identify_gradient(reward_moments, on_policy.targets, tolerance=tolerance),
        off_policy=_identify_off_policy(function, tolerance) if function.takes_logp_old else None,
        detached=not values.requires_grad,
        acts_like=_term_with_equal_pull(function, tolerance) if per_token else None,
        extremes=scan_term(token_term) if per_token else None,
        departure=find_departure(token_term, gradient)
        if per_token and tolerance == TOLERANCE
        else None,
        num_completions=len(values),
    )


def _validated_values(function: UserFunction, pairs: EnumeratedPairs) -> Tensor:
    """Return the values of two equal calls; raise on non-finite, random or integer results."""
    first, second = (_evaluate_pairs(function, pairs) for _ in range(2))
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


def _rectangular_worlds(*, sampler_drift: float) -> list[World]:
    """Return worlds with completions of equal length, which fit [completions, tokens] tensors."""
    return [
        make_world("near", seed=1, drift=0.15, sampler_drift=sampler_drift),
        make_world("far", seed=1, drift=1.2, sampler_drift=sampler_drift),
        make_world("very far", seed=9, drift=3.0, sampler_drift=sampler_drift),
        make_world("shared", seed=2, drift=1.0, shared=True, sampler_drift=sampler_drift),
    ]


def _evaluate_pairs(function: UserFunction, pairs: EnumeratedPairs) -> Tensor:
    inputs, world = pairs.inputs, pairs.world
    logits_ref = world.prefix_logits(world.theta_ref)[world.completion_pairs.state]
    return function(
        {
            "logp": inputs.logp.view(-1, COMPLETION_LENGTH),
            "logp_ref": inputs.logp_ref.view(-1, COMPLETION_LENGTH),
            "logp_old": inputs.logp_old.view(-1, COMPLETION_LENGTH),
            "logits": pairs.leaf_logits.view(-1, COMPLETION_LENGTH, pairs.leaf_logits.shape[-1]),
            "logits_ref": logits_ref.view(-1, COMPLETION_LENGTH, logits_ref.shape[-1]),
        }
    )


def _function_term(function: UserFunction, pairs: EnumeratedPairs) -> "_PrecomputedTerm":
    """Return the function's values as a term; one per completion goes to its first token."""
    values = _evaluate_pairs(function, pairs)
    if values.ndim == 1:
        values = torch.nn.functional.pad(values[:, None], (0, COMPLETION_LENGTH - 1))
    return _PrecomputedTerm(values.flatten().double() + 0 * pairs.inputs.logp)


def _as_reward_term(term: "_PrecomputedTerm", pairs: EnumeratedPairs) -> "_PrecomputedTerm":
    cost = term.values.detach().view(-1, COMPLETION_LENGTH).sum(-1, keepdim=True)
    return _PrecomputedTerm(
        score_term(cost.expand(-1, COMPLETION_LENGTH).flatten(), logp=pairs.inputs.logp)
    )


@dataclass(frozen=True)
class _PrecomputedTerm:
    """A term that returns values computed in advance."""

    values: Float[Tensor, "N"]

    def __call__(self, _: object) -> Tensor:
        return self.values


def _identify_off_policy(function: UserFunction, tolerance: float) -> GradientIdentity:
    world_set = WorldSet.from_worlds(_rectangular_worlds(sampler_drift=0.4))
    term_moments = [
        gradient_moments(pairs, _function_term(function, pairs)) for pairs in world_set.world_pairs
    ]
    return identify_gradient(term_moments, world_set.targets, tolerance=tolerance)


def _known_quantities(world: World) -> dict[str, float]:
    """Return every known quantity per completion, as an exact sum."""
    sums = {
        "kl": reverse_kl,
        "forward_kl": forward_kl,
        "chi_square": lambda p, q: 2 * half_chi_square(p, q) - 1,
        "k2": lambda p, q: (p.exp() * (p - q) ** 2 / 2).sum(-1),
        "abs": lambda p, q: (p.exp() * (p - q).abs()).sum(-1),
        "exp_k1": lambda p, q: ((2 * p - q).exp() * (p - q)).sum(-1),
        "bucket": bucketed_top_k_kl,
    }
    values = {name: float(sum_over_prefixes(world, kl)) for name, kl in sums.items()}
    values["chi_square_minus_kl"] = values["chi_square"] - values["kl"]
    return {name: values[name] for name in KNOWN_VALUES}


def _identify_value(
    mean_values: list[float], world_quantities: list[dict[str, float]], tolerance: float
) -> tuple[str | None, float]:
    """Return the quantity of which the mean values are one common multiple, or none."""
    if max(map(abs, mean_values)) < TOLERANCE:
        return "zero", 0.0
    for name in KNOWN_VALUES:
        ratios = [
            value / quantities[name]
            for value, quantities in zip(mean_values, world_quantities, strict=True)
        ]
        if max(ratios) - min(ratios) < tolerance * abs(ratios[0]):
            return name, ratios[0]
    return None, 1.0


def _evaluate_one_token(function: UserFunction, logp: Tensor, logp_ref: Tensor) -> Tensor:
    arrays = {"logp": logp, "logp_ref": logp_ref, "logp_old": logp.detach()}
    # with one token per completion, [completions] and [completions, 1] are equivalent
    return function({name: array[:, None] for name, array in arrays.items()}).flatten()


def _term_with_equal_pull(function: UserFunction, tolerance: float) -> str | None:
    """Return the published term with the same pull on each token near the reference."""
    d = torch.linspace(-COMPARED_DISTANCE, COMPARED_DISTANCE, 101, dtype=torch.float64)
    d = d[d.abs() > 1e-3]  # |k1| is not differentiable at 0
    user_pull = pull_in_float64(lambda logp, ref: _evaluate_one_token(function, logp, ref), d)
    for name in ("k1", "k2", "k3", "k3_reversed", "abs"):
        term = ESTIMATORS[name].term
        term_pull = pull_in_float64(lambda logp, ref: term(one_token_rows(logp, ref)), d)  # noqa: B023
        if float((user_pull - term_pull).abs().max()) < tolerance:
            return name
    return None
