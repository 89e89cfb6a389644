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

from klinic.verify.extremes import FARTHEST, STEP, Sides, TokenFunction, pull_in_float64
from klinic.verify.identify import Identity

TOLERANCE = 1e-6  # relative to the pull; float64 is more precise than that until it cancels

PULLS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_token": lambda d: -d,
    "forward_token": lambda d: -torch.expm1(d),
}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Distances at which a function leaves its identified gradient, and reverses."""

    at: Sides
    away: Sides
    """Smallest distance at which it pushes away from the reference."""


def departure(term: TokenFunction, found: Identity) -> Departure | None:
    """Scan the pull on both sides; None for an identity without a known pull."""
    if found.target not in PULLS:
        return None
    above, below = (_follow(term, found, sign) for sign in (1.0, -1.0))
    return Departure(
        at=Sides(above=above[0], below=below[0]), away=Sides(above=above[1], below=below[1])
    )


def _follow(term: TokenFunction, found: Identity, sign: float) -> tuple[float | None, float | None]:
    d = sign * torch.arange(STEP, FARTHEST, STEP, dtype=torch.float64)
    pull = pull_in_float64(term, d)
    right = found.scale * PULLS[str(found.target)](d)
    constant = (pull - right)[0]
    wrong = (pull - right - constant).abs() > TOLERANCE * (1 + right.abs())
    against = wrong & (pull * right < 0)
    return _first(d, wrong), _first(d, against)


def _first(d: Tensor, holds: Tensor) -> float | None:
    where = holds.nonzero()
    return round(float(d[int(where[0])]), 3) if len(where) else None
