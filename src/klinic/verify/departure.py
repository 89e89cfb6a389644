"""How far does a function keep the gradient it was found to have?

The worlds reach some ten nats from the reference. A function can be right there and turn round
beyond. So the pull of a function whose gradient was named is followed to 200 nats on both sides and
held against the pull that the name stands for:

    reverse_token  -d, times the multiple found
    forward_token  1 - exp(d), times the multiple found

A constant may be added to either: a constant pull averages to zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from klinic.verify.extremes import FARTHEST, STEP, Sides, TokenFunction, pull_in_float64
from klinic.verify.identify import Identity

TOLERANCE = 1e-6  # of the pull itself; float64 loses no more than that before it cancels

PULLS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_token": lambda d: -d,
    "forward_token": lambda d: -torch.expm1(d),
}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where a function leaves the gradient of its name, and whether it turns against it."""

    at: Sides
    away: Sides
    """From where on, at first, it pushes away from the reference."""


def departure(term: TokenFunction, found: Identity) -> Departure | None:
    """Follow the pull of a function to both ends; None where no pull is known for its name."""
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
