"""Matches an expected gradient with a target gradient.

A gradient is identified only if it equals a multiple of one target in every world, with the same
multiple in all: agreement in one world can be chance, in several families of policies it is not.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from klinic.maths.kl_estimators import Gradient
from klinic.verify.expectation import GradientMoments

TOLERANCE = 1e-9  # float64 sums of some 10,000 terms agree to 1e-14; a wrong formula does not

Vector = Float[Tensor, "_"]  # worlds differ in their number of parameters
Targets = dict[str, Vector]


@dataclass(frozen=True, kw_only=True)
class GradientIdentity:
    """The target that a gradient is a multiple of, with the scale and the error of the fit."""

    target: str | None
    """`zero`, a key of `target_gradients`, or None without a match."""
    scale: float
    error: float
    """Largest deviation over the worlds, relative to the gradient itself."""

    @property
    def gradient(self) -> Gradient:
        """The public name of the target."""
        public_names = {member.value for member in Gradient}
        return Gradient(self.target) if self.target in public_names else Gradient.OTHER


def worst_error(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if one is NaN: `max` alone can ignore a NaN."""
    values = list(errors)
    return math.nan if any(map(math.isnan, values)) else max(values)


def relative_norm(error: Vector, targets: Targets) -> float:
    """Return the norm of a vector relative to the gradient of the sequence KL."""
    return float(error.norm() / targets["reverse_sequence"].norm())


def identify_gradient(
    moments: Sequence[GradientMoments],
    world_targets: Sequence[Targets],
    *,
    tolerance: float = TOLERANCE,
) -> GradientIdentity:
    """Return the target that fits in every world with one common multiple, or none."""
    # relative to one pair's gradient: a mean that is small because the term is small is not zero
    size = worst_error(
        _safe_ratio(float(moment.gradient.norm()), moment.gradient_rms) for moment in moments
    )
    if size < tolerance:
        return GradientIdentity(target="zero", scale=0.0, error=size)
    candidates = [_fit_target(name, moments, world_targets) for name in world_targets[0]]
    fitting = [fit for fit in candidates if fit.error < tolerance]
    if fitting:
        return fitting[0]  # of targets that coincide in every world, the simplest comes first
    closest = min(fit.error for fit in candidates)
    return GradientIdentity(target=None, scale=1.0, error=closest)


def nearest_target(
    moments: Sequence[GradientMoments], world_targets: Sequence[Targets]
) -> GradientIdentity:
    """Return the target with the smallest error of the fit, however large."""
    candidates = [_fit_target(name, moments, world_targets) for name in world_targets[0]]
    return min(candidates, key=lambda fit: math.inf if math.isnan(fit.error) else fit.error)


def fits_identity(
    identity: GradientIdentity,
    moments: Sequence[GradientMoments],
    world_targets: Sequence[Targets],
    *,
    tolerance: float,
) -> bool:
    """Whether the gradients of these worlds are the identified multiple of the same target."""
    target = identity.target
    if target is None or target == "zero":
        return False
    return all(
        float((moment.gradient - identity.scale * targets[target]).norm())
        <= tolerance * abs(identity.scale) * float(targets[target].norm())
        for moment, targets in zip(moments, world_targets, strict=True)
    )


def deviation_from_target(
    target: str, moments: Sequence[GradientMoments], world_targets: Sequence[Targets]
) -> float:
    """Return the largest deviation of the gradients from the target itself (multiple 1)."""
    return worst_error(
        relative_norm(moment.gradient - (0 if target == "zero" else targets[target]), targets)
        for moment, targets in zip(moments, world_targets, strict=True)
    )


def _fit_target(
    name: str, moments: Sequence[GradientMoments], world_targets: Sequence[Targets]
) -> GradientIdentity:
    """Fit one multiple of one target to the gradients of all worlds."""
    vectors = [moment.gradient for moment in moments]
    targets = [world[name] for world in world_targets]
    norm = sum(float(target @ target) for target in targets)
    inner = sum(float(v @ t) for v, t in zip(vectors, targets, strict=True))
    scale = _safe_ratio(inner, norm)
    error = worst_error(
        _safe_ratio(float((v - scale * t).norm()), float(v.norm()))
        for v, t in zip(vectors, targets, strict=True)
    )
    return GradientIdentity(target=name, scale=scale, error=error)


def _safe_ratio(part: float, whole: float) -> float:
    return part / whole if whole else part
