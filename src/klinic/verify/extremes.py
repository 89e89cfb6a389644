"""Finds where a per-token term overflows, loses precision or has no gradient.

Scans a term over d = log ref - log policy from -200 to 200, in float32 as a trainer computes it,
and compares it with float64 on the same inputs. d > 0: the token is likelier under the reference;
d < 0: it is likelier under the policy. The pull is the derivative of the term in logp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FARTHEST = 200.0
STEP = 0.005
DEAD = 1e-6  # a smaller pull counts as none: the correct one is |d|
WRONG = 0.01  # a relative error above this is reported
SMALLEST = 1e-6
ANCHOR = -0.5  # the larger of the two log-probs; a log-prob cannot be positive

TokenFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A limit on either side of d = 0, None for no limit."""

    above: float | None
    below: float | None

    def __bool__(self) -> bool:
        return self.above is not None or self.below is not None

    def __str__(self) -> str:
        above = None if self.above is None else f"d > {self.above:.2f}"
        below = None if self.below is None else f"d < {self.below:.2f}"
        return " and ".join(side for side in (above, below) if side) or "nowhere"


@dataclass(frozen=True, kw_only=True)
class Extremes:
    """Numerical limits of a term far from, and very near to, the reference."""

    overflows_at: Sides
    """Value or gradient is non-finite beyond this distance."""
    saturates_at: Sides
    """No gradient beyond this distance: a dead zone."""
    cancels_at: Sides
    """The float32 gradient is wrong by more than 1% from this distance on."""
    imprecise_below: float | None
    """The float32 value is wrong by more than 1% for |d| below this."""


@dataclass(frozen=True, kw_only=True)
class _Scan:
    value: Tensor
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class _Both:
    single: _Scan
    double: _Scan


@dataclass(frozen=True, kw_only=True)
class _Side:
    overflows: float | None
    cancels: float | None
    dead: float | None


def scan(term: TokenFunction) -> Extremes:
    """Return where the term overflows, saturates, cancels and loses precision."""
    distance = torch.arange(STEP, FARTHEST + STEP, STEP, dtype=torch.float64)
    above = _judge(distance, _measure(term, distance))
    below = _judge(-distance, _measure(term, -distance))
    return Extremes(
        overflows_at=Sides(above=above.overflows, below=below.overflows),
        saturates_at=Sides(above=above.dead, below=below.dead),
        cancels_at=Sides(above=above.cancels, below=below.cancels),
        imprecise_below=_imprecise_below(term),
    )


def _measure(term: TokenFunction, d: Tensor) -> _Both:
    logp = (ANCHOR - d.clamp(min=0)).float()
    logp_ref = (ANCHOR + d.clamp(max=0)).float()
    return _Both(
        single=_run(term, logp, logp_ref), double=_run(term, logp.double(), logp_ref.double())
    )


def _run(term: TokenFunction, logp: Tensor, logp_ref: Tensor) -> _Scan:
    logp = logp.clone().requires_grad_()
    value = term(logp, logp_ref)
    gradient = torch.zeros_like(logp)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.sum(), logp)
    return _Scan(value=value.detach().double(), gradient=gradient.double())


def pull_in_float64(term: TokenFunction, d: Tensor) -> Tensor:
    """Return the derivative of a term in logp at each d, computed in float64."""
    return _run(term, ANCHOR - d.clamp(min=0), ANCHOR + d.clamp(max=0)).gradient


def _judge(d: Tensor, both: _Both) -> _Side:
    single, truth = both.single.gradient, both.double.gradient
    finite = both.single.value.isfinite() & single.isfinite()
    pulling = truth.isfinite() & (truth.abs() > DEAD)
    wrong = finite & pulling & ((single - truth).abs() > WRONG * truth.abs())
    cancels = _first_of_run(d, wrong)
    dead = _first_of_tail(d, ~pulling)  # includes a dead zone that ends in an overflow
    if dead is not None and not bool((truth.abs() < DEAD)[(d - dead).abs().argmin()]):
        dead = None
    if cancels is not None and dead is not None and abs(cancels) < abs(dead):
        dead = None  # float64 cancels as well: not a dead zone of the formula
    return _Side(overflows=_first_of_tail(d, ~finite), cancels=cancels, dead=dead)


def _first_of_tail(d: Tensor, holds: Tensor) -> float | None:
    """Return the first d from which the condition holds up to the end of the scan."""
    if not bool(holds[-1]):
        return None
    failing = (~holds).nonzero()
    start = 0 if len(failing) == 0 else int(failing[-1]) + 1
    return _rounded(d[start])


def _first_of_run(d: Tensor, holds: Tensor) -> float | None:
    """Return the first d at which the condition holds for three neighbours, to exclude chance."""
    runs = (holds[:-2] & holds[1:-1] & holds[2:]).nonzero()
    return _rounded(d[int(runs[0])]) if len(runs) else None


def _rounded(d: Tensor) -> float:
    return round(float(d), 3)


def _imprecise_below(term: TokenFunction) -> float | None:
    d = torch.logspace(-6, 0, 1201, dtype=torch.float64)
    both = _measure(term, torch.cat([d, -d]))
    truth = both.double.value
    wrong = (both.single.value - truth).abs() > WRONG * truth.abs()
    wrong &= truth != 0
    largest = torch.cat([d, d])[wrong]
    return float(f"{float(largest.max()):.1e}") if len(largest) else None
