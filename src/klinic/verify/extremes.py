"""Finds where a per-token term overflows, loses precision or has no gradient.

Scans a term over d = log ref - log policy from -200 to 200, in float32 as a trainer computes it,
and compares it with float64 on the same inputs. d > 0: the token is likelier under the reference;
d < 0: it is likelier under the policy. The pull is the derivative of the term in logp.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_DISTANCE = 200.0
DISTANCE_STEP = 0.005
DEAD_PULL = 1e-6  # a smaller pull counts as none: the correct one is |d|
MAX_RELATIVE_ERROR = 0.01  # a relative error above this is reported
SMALLEST = 1e-6
LARGER_LOGP = -0.5  # the larger of the two log-probs; a log-prob cannot be positive

TokenFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class SideLimits:
    """A limit on either side of d = 0, None for no limit."""

    above: float | None
    below: float | None

    def __bool__(self) -> bool:
        return self.above is not None or self.below is not None

    def reached_within(self, distance: float) -> bool:
        """Whether one of the limits is within this distance of 0."""
        return any(edge is not None and abs(edge) <= distance for edge in (self.above, self.below))

    def contains(self, d: Tensor, *, margin: float) -> Tensor:
        """Return which distances are inside the limits by at least the margin."""
        above = math.inf if self.above is None else self.above - margin
        below = -math.inf if self.below is None else self.below + margin
        return (d < above) & (d > below)

    def __str__(self) -> str:
        above = None if self.above is None else f"d > {self.above:.2f}"
        below = None if self.below is None else f"d < {self.below:.2f}"
        return " and ".join(side for side in (above, below) if side) or "nowhere"


@dataclass(frozen=True, kw_only=True)
class Extremes:
    """Numerical limits of a term far from, and very near to, the reference."""

    overflows_at: SideLimits
    """Value or gradient is non-finite beyond this distance."""
    saturates_at: SideLimits
    """No gradient beyond this distance: a dead zone."""
    cancels_at: SideLimits
    """The float32 gradient is wrong by more than 1% from this distance on."""
    imprecise_below: float | None
    """The float32 value is wrong by more than 1% for |d| below this."""


@dataclass(frozen=True, kw_only=True)
class _TermValues:
    value: Tensor
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class _PrecisionPair:
    single: _TermValues
    double: _TermValues


@dataclass(frozen=True, kw_only=True)
class _SideFindings:
    overflows: float | None
    cancels: float | None
    dead: float | None


def scan_term(term: TokenFunction) -> Extremes:
    """Return where the term overflows, saturates, cancels and loses precision."""
    distance = torch.arange(
        DISTANCE_STEP, MAX_DISTANCE + DISTANCE_STEP, DISTANCE_STEP, dtype=torch.float64
    )
    above = _classify_side(distance, _evaluate_both(term, distance))
    below = _classify_side(-distance, _evaluate_both(term, -distance))
    return Extremes(
        overflows_at=SideLimits(above=above.overflows, below=below.overflows),
        saturates_at=SideLimits(above=above.dead, below=below.dead),
        cancels_at=SideLimits(above=above.cancels, below=below.cancels),
        imprecise_below=_imprecise_below(term),
    )


def _evaluate_both(term: TokenFunction, d: Tensor) -> _PrecisionPair:
    logp = (LARGER_LOGP - d.clamp(min=0)).float()
    logp_ref = (LARGER_LOGP + d.clamp(max=0)).float()
    return _PrecisionPair(
        single=_evaluate_term(term, logp, logp_ref),
        double=_evaluate_term(term, logp.double(), logp_ref.double()),
    )


def _evaluate_term(term: TokenFunction, logp: Tensor, logp_ref: Tensor) -> _TermValues:
    logp = logp.clone().requires_grad_()
    value = term(logp, logp_ref)
    gradient = torch.zeros_like(logp)
    if value.requires_grad:
        (pull,) = torch.autograd.grad(value.sum(), logp, allow_unused=True)
        gradient = gradient if pull is None else pull
    return _TermValues(value=value.detach().double(), gradient=gradient.double())


def pull_in_float64(term: TokenFunction, d: Tensor) -> Tensor:
    """Return the derivative of a term in logp at each d, computed in float64."""
    return _evaluate_term(term, LARGER_LOGP - d.clamp(min=0), LARGER_LOGP + d.clamp(max=0)).gradient


def _classify_side(d: Tensor, both: _PrecisionPair) -> _SideFindings:
    single, exact = both.single.gradient, both.double.gradient
    finite = both.single.value.isfinite() & single.isfinite()
    has_pull = exact.isfinite() & (exact.abs() > DEAD_PULL)
    is_wrong = finite & has_pull & ((single - exact).abs() > MAX_RELATIVE_ERROR * exact.abs())
    cancels = _first_of_any_run(d, is_wrong)
    dead = _first_of_final_run(d, ~has_pull)  # includes a dead zone that ends in an overflow
    if dead is not None and not bool((exact.abs() < DEAD_PULL)[(d - dead).abs().argmin()]):
        dead = None
    if cancels is not None and dead is not None and abs(cancels) < abs(dead):
        dead = None  # float64 cancels as well: not a dead zone of the formula
    return _SideFindings(overflows=_first_of_final_run(d, ~finite), cancels=cancels, dead=dead)


def _first_of_final_run(d: Tensor, condition: Tensor) -> float | None:
    """Return the first d from which the condition holds up to the end of the scan."""
    if not bool(condition[-1]):
        return None
    failing = (~condition).nonzero()
    start = 0 if len(failing) == 0 else int(failing[-1]) + 1
    return _round_distance(d[start])


def _first_of_any_run(d: Tensor, condition: Tensor) -> float | None:
    """Return the first d at which the condition holds for three neighbours, to exclude chance."""
    runs = (condition[:-2] & condition[1:-1] & condition[2:]).nonzero()
    return _round_distance(d[int(runs[0])]) if len(runs) else None


def _round_distance(d: Tensor) -> float:
    return round(float(d), 3)


def _imprecise_below(term: TokenFunction) -> float | None:
    d = torch.logspace(-6, 0, 1201, dtype=torch.float64)
    both = _evaluate_both(term, torch.cat([d, -d]))
    exact = both.double.value
    is_wrong = (both.single.value - exact).abs() > MAX_RELATIVE_ERROR * exact.abs()
    is_wrong &= exact != 0
    wrong_distances = torch.cat([d, d])[is_wrong]
    return float(f"{float(wrong_distances.max()):.1e}") if len(wrong_distances) else None
