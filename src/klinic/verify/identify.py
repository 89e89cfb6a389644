"""Which of the known gradients is this one?

A gradient is named only if it equals a multiple of one target in every world, with one multiple for
all of them: agreement in one world can be chance, agreement in several families of policies is not.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from klinic.maths.kl_estimators import Gradient
from klinic.verify.expectation import Moments

TOLERANCE = 1e-9  # float64 sums of some 10,000 terms agree to 1e-14; a wrong formula does not

Vector = Float[Tensor, "_"]  # worlds differ in how many parameters they have
Targets = dict[str, Vector]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A gradient is `scale` times the named target, up to `error`."""

    target: str | None
    """`zero`, a key of `targets`, or None where nothing fits."""
    scale: float
    error: float
    """Largest deviation over the worlds, relative to the gradient itself."""

    @property
    def gradient(self) -> Gradient:
        """The public name of the target."""
        known = {member.value for member in Gradient}
        return Gradient(self.target) if self.target in known else Gradient.OTHER


def worst(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if one is NaN: `max` alone would pass it over."""
    listed = list(errors)
    return math.nan if any(map(math.isnan, listed)) else max(listed)


def relative(error: Vector, targets: Targets) -> float:
    """Return the length of a vector relative to the gradient of the sequence KL."""
    return float(error.norm() / targets["reverse_sequence"].norm())


def identify(
    found: Sequence[Moments], worlds: Sequence[Targets], *, tolerance: float = TOLERANCE
) -> Identity:
    """Name the target that fits in every world with one common multiple, or none."""
    # against one completion's gradient: a mean that is small because the term is small is not zero
    size = worst(_ratio(float(moment.gradient.norm()), moment.size) for moment in found)
    if size < tolerance:
        return Identity(target="zero", scale=0.0, error=size)
    candidates = [_fit(name, found, worlds) for name in worlds[0]]
    near = [fit for fit in candidates if fit.error < tolerance]
    if near:
        return near[0]  # targets that coincide in every world are listed plainest first
    closest = min(fit.error for fit in candidates)
    return Identity(target=None, scale=1.0, error=closest)


def deviation(target: str, found: Sequence[Moments], worlds: Sequence[Targets]) -> float:
    """Return how far the gradients are from the target itself, multiple 1, at worst."""
    return worst(
        relative(moment.gradient - (0 if target == "zero" else targets[target]), targets)
        for moment, targets in zip(found, worlds, strict=True)
    )


def _fit(name: str, found: Sequence[Moments], worlds: Sequence[Targets]) -> Identity:
    """Fit one multiple of one target to the gradients of all worlds."""
    vectors = [moment.gradient for moment in found]
    targets = [world[name] for world in worlds]
    norm = sum(float(target @ target) for target in targets)
    inner = sum(float(v @ t) for v, t in zip(vectors, targets, strict=True))
    scale = _ratio(inner, norm)
    error = worst(
        _ratio(float((v - scale * t).norm()), float(v.norm()))
        for v, t in zip(vectors, targets, strict=True)
    )
    return Identity(target=name, scale=scale, error=error)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else part
