"""Which of the known gradients is this one?

A gradient is named only if it equals a multiple of one target in every world, with one multiple for
all of them: agreement in one world can be chance, agreement in several families of policies is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from klinic.maths.kl_estimators import Gradient

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
    """Largest deviation over the worlds, relative to the gradient of the sequence KL."""

    @property
    def gradient(self) -> Gradient:
        """The public name of the target."""
        known = {member.value for member in Gradient}
        return Gradient(self.target) if self.target in known else Gradient.OTHER


def relative(error: Vector, targets: Targets) -> float:
    """Return the length of a vector relative to the gradient of the sequence KL."""
    return float(error.norm() / targets["reverse_sequence"].norm())


def identify(found: Sequence[Vector], worlds: Sequence[Targets]) -> Identity:
    """Name the target that fits in every world with one common multiple, or none."""
    size = max(relative(vector, targets) for vector, targets in zip(found, worlds, strict=True))
    if size < TOLERANCE:
        return Identity(target="zero", scale=0.0, error=size)
    candidates = [_fit(name, found, worlds) for name in worlds[0]]
    best = min(candidates, key=lambda fit: fit.error)
    near = [fit for fit in candidates if fit.error < TOLERANCE]
    if not near:
        return Identity(target=None, scale=1.0, error=best.error)
    return near[0]  # targets that coincide in every world are listed plainest first


def deviation(target: str, found: Sequence[Vector], worlds: Sequence[Targets]) -> float:
    """Return how far the gradients are from the target itself, multiple 1, at worst."""
    pairs = zip(found, worlds, strict=True)
    return max(relative(vector - targets[target], targets) for vector, targets in pairs)


def _fit(name: str, found: Sequence[Vector], worlds: Sequence[Targets]) -> Identity:
    """Fit one multiple of one target to the gradients of all worlds."""
    targets = [world[name] for world in worlds]
    norm = sum(float(target @ target) for target in targets)
    scale = sum(float(v @ t) for v, t in zip(found, targets, strict=True)) / norm if norm else 0.0
    scaled = [vector - scale * target for vector, target in zip(found, targets, strict=True)]
    error = max(relative(left, world) for left, world in zip(scaled, worlds, strict=True))
    return Identity(target=name, scale=scale, error=error)
