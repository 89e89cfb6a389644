"""Finds the distance from the reference at which a function leaves its identified gradient.

The worlds reach about ten nats from the reference. A function can be right there and reverse
beyond. So the pull of a function (its derivative in logp) is compared, up to 200 nats on both
sides, with that of the identified gradient:

    reverse_token  -d, times the fitted multiple
    forward_token  1 - exp(d), times the fitted multiple

A constant offset is allowed in either: a constant pull averages to zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from klinic.verify.extremes import (
    DISTANCE_STEP,
    MAX_DISTANCE,
    SideLimits,
    TokenFunction,
    pull_in_float64,
)
from klinic.verify.identify import GradientIdentity

PULL_TOLERANCE = 1e-6  # relative to the pull; float64 is more precise than that until it cancels

EXPECTED_PULLS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_token": lambda d: -d,
    "forward_token": lambda d: -torch.expm1(d),
}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Distances at which a function leaves its identified gradient, and reverses."""

    departs_at: SideLimits
    reverses_at: SideLimits
    """Smallest distance at which it pushes away from the reference."""


def find_departure(term: TokenFunction, identity: GradientIdentity) -> Departure | None:
    """Scan the pull on both sides; None for an identity without a known pull."""
    if identity.target not in EXPECTED_PULLS:
        return None
    above, below = (_scan_side(term, identity, sign) for sign in (1.0, -1.0))
    return Departure(
        departs_at=SideLimits(above=above[0], below=below[0]),
        reverses_at=SideLimits(above=above[1], below=below[1]),
    )


def _scan_side(
    term: TokenFunction, identity: GradientIdentity, sign: float
) -> tuple[float | None, float | None]:
    d = sign * torch.arange(DISTANCE_STEP, MAX_DISTANCE, DISTANCE_STEP, dtype=torch.float64)
    pull = pull_in_float64(term, d)
    expected_pull = identity.scale * EXPECTED_PULLS[str(identity.target)](d)
    constant = (pull - expected_pull)[0]
    departs = (pull - expected_pull - constant).abs() > PULL_TOLERANCE * (1 + expected_pull.abs())
    reverses = departs & (pull * expected_pull < 0)
    return _first_distance(d, departs), _first_distance(d, reverses)


def _first_distance(d: Tensor, condition: Tensor) -> float | None:
    indices = condition.nonzero()
    return round(float(d[int(indices[0])]), 3) if len(indices) else None
