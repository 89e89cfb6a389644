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
from klinic.maths.score import score
from klinic.verify.departure import Departure, departure
from klinic.verify.estimators import Setting, one_token_rows
from klinic.verify.expectation import Drawn, moments
from klinic.verify.extremes import Extremes, pull_in_float64, scan
from klinic.verify.identify import TOLERANCE, Identity, identify
from klinic.verify.loading import Role, UserFunction
from klinic.verify.targets import TOP_K, at_prefixes, bucket, forward, half_chi_square, reverse
from klinic.verify.world import LENGTH, World, make_world

# Tolerance of the identification, by the dtype that the function computes in.
TOLERANCES = {
    torch.float64: TOLERANCE,
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
PROBED = 1.0  # largest |d| at which a function's pull is compared with the known terms

# Quantities that a mean value can equal, each an exact sum, simplest first.
VALUES = {
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
class Measured:
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
    gradient: Identity
    as_reward: Identity
    """The gradient when detached and used as a cost in the reward of the completion."""
    off_policy: Identity | None
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


def measure(function: UserFunction) -> Measured:
    """Measure a function in every world."""
    on_policy = Setting.of(_rectangular_worlds(sampler_drift=0.0))
    returned = _checked_values(function, on_policy.drawn[-1])
    try:
        return _measure(function, on_policy, returned)
    except RuntimeError as error:  # autograd fails, for example after an in-place operation
        raise FunctionError(
            f"{function.name} cannot be differentiated: {first_line(error)} A loss that uses it "
            "would fail in the same way."
        ) from error


def _measure(function: UserFunction, on_policy: Setting, returned: Tensor) -> Measured:
    terms = [(drawn, _term(function, drawn)) for drawn in on_policy.drawn]
    found = [moments(drawn, term) for drawn, term in terms]
    reward = [moments(drawn, _as_reward(term, drawn)) for drawn, term in terms]
    tolerance = TOLERANCES[returned.dtype]
    known = [_values(world) for world in on_policy.worlds]
    value, scale = _identify_value([m.value for m in found], known, tolerance)
    to_kl = [m.value / exact["kl"] for m, exact in zip(found, known, strict=True)]
    per_token = not function.takes_logits and returned.ndim == 2
    gradient = identify(found, on_policy.targets, tolerance=tolerance)

    def pull_of(logp: Tensor, logp_ref: Tensor) -> Tensor:
        return _one_token(function, logp, logp_ref)

    return Measured(
        name=function.name,
        roles=function.roles,
        precision=str(returned.dtype).removeprefix("torch."),
        value=value,
        value_scale=scale,
        value_to_kl=(min(to_kl), max(to_kl)),
        gradient=gradient,
        as_reward=identify(reward, on_policy.targets, tolerance=tolerance),
        off_policy=_off_policy(function, tolerance) if function.takes_old else None,
        detached=not returned.requires_grad,
        acts_like=_acts_like(function, tolerance) if per_token else None,
        extremes=scan(pull_of) if per_token else None,
        departure=departure(pull_of, gradient) if per_token and tolerance == TOLERANCE else None,
        num_completions=len(returned),
    )


def _checked_values(function: UserFunction, drawn: Drawn) -> Tensor:
    """Return the values of two equal calls; raise on non-finite, random or integer results."""
    first, second = (_evaluate(function, drawn) for _ in range(2))
    if not bool(first.isfinite().all()):
        bad = int((~first.isfinite()).sum())
        raise FunctionError(
            f"{function.name} returned NaN or infinity for {bad} of {first.numel()} ordinary "
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


def _evaluate(function: UserFunction, drawn: Drawn) -> Tensor:
    inputs, world = drawn.inputs, drawn.world
    logits_ref = world.logits(world.theta_ref)[world.pairs.state]
    return function(
        {
            "logp": inputs.logp.view(-1, LENGTH),
            "logp_ref": inputs.logp_ref.view(-1, LENGTH),
            "logp_old": inputs.logp_old.view(-1, LENGTH),
            "logits": drawn.leaf.view(-1, LENGTH, drawn.leaf.shape[-1]),
            "logits_ref": logits_ref.view(-1, LENGTH, logits_ref.shape[-1]),
        }
    )


def _term(function: UserFunction, drawn: Drawn) -> "_Handed":
    """Return the function's values as a term; one per completion goes to its first token."""
    values = _evaluate(function, drawn)
    if values.ndim == 1:
        values = torch.nn.functional.pad(values[:, None], (0, LENGTH - 1))
    return _Handed(values.flatten().double() + 0 * drawn.inputs.logp)


def _as_reward(term: "_Handed", drawn: Drawn) -> "_Handed":
    cost = term.values.detach().view(-1, LENGTH).sum(-1, keepdim=True)
    return _Handed(score(cost.expand(-1, LENGTH).flatten(), logp=drawn.inputs.logp))


@dataclass(frozen=True)
class _Handed:
    """A term that returns values computed in advance."""

    values: Float[Tensor, "N"]

    def __call__(self, _: object) -> Tensor:
        return self.values


def _off_policy(function: UserFunction, tolerance: float) -> Identity:
    setting = Setting.of(_rectangular_worlds(sampler_drift=0.4))
    found = [moments(drawn, _term(function, drawn)) for drawn in setting.drawn]
    return identify(found, setting.targets, tolerance=tolerance)


def _values(world: World) -> dict[str, float]:
    """Return every known quantity per completion, as an exact sum."""
    sums = {
        "kl": reverse,
        "forward_kl": forward,
        "chi_square": lambda p, q: 2 * half_chi_square(p, q) - 1,
        "k2": lambda p, q: (p.exp() * (p - q) ** 2 / 2).sum(-1),
        "abs": lambda p, q: (p.exp() * (p - q).abs()).sum(-1),
        "exp_k1": lambda p, q: ((2 * p - q).exp() * (p - q)).sum(-1),
        "bucket": bucket,
    }
    values = {name: float(at_prefixes(world, kl)) for name, kl in sums.items()}
    values["chi_square_minus_kl"] = values["chi_square"] - values["kl"]
    return {name: values[name] for name in VALUES}


def _identify_value(
    found: list[float], known: list[dict[str, float]], tolerance: float
) -> tuple[str | None, float]:
    """Return the quantity of which the mean values are one common multiple, or none."""
    if max(map(abs, found)) < TOLERANCE:
        return "zero", 0.0
    for name in VALUES:
        ratios = [value / quantities[name] for value, quantities in zip(found, known, strict=True)]
        if max(ratios) - min(ratios) < tolerance * abs(ratios[0]):
            return name, ratios[0]
    return None, 1.0


def _one_token(function: UserFunction, logp: Tensor, logp_ref: Tensor) -> Tensor:
    arrays = {"logp": logp, "logp_ref": logp_ref, "logp_old": logp.detach()}
    # with one token per completion, [completions] and [completions, 1] are equivalent
    return function({name: array[:, None] for name, array in arrays.items()}).flatten()


def _acts_like(function: UserFunction, tolerance: float) -> str | None:
    """Return the published term with the same pull on each token near the reference."""
    d = torch.linspace(-PROBED, PROBED, 101, dtype=torch.float64)
    d = d[d.abs() > 1e-3]  # |k1| is not differentiable at 0
    mine = pull_in_float64(lambda logp, ref: _one_token(function, logp, ref), d)
    for name in ("k1", "k2", "k3", "k3_reversed", "abs"):
        term = ESTIMATORS[name].term
        theirs = pull_in_float64(lambda logp, ref: term(one_token_rows(logp, ref)), d)  # noqa: B023
        if float((mine - theirs).abs().max()) < tolerance:
            return name
    return None
