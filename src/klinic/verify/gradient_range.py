"""Finds where a function of log-probs leaves its identified gradient.

The worlds reach about ten nats from the reference, with log-probs down to -10. A function can be
right there and wrong beyond. So the pull of a function on one token of a row (its derivative in
logp) is compared with that of the identified gradient:

    reverse_token     k1, times the fitted multiple; no pull on earlier tokens
    reverse_sequence  the same, and as much on each earlier token
    forward_token     1 - exp(d), times the fitted multiple

A constant offset is allowed in each: it may depend on the other tokens, and averages to zero. A
function that mixes the completions of a batch is called on pairs, at fewer points.

    line       d up to 200 nats on both sides, the larger log-prob at -0.5
    plane      all pairs of log-probs of policy and reference from 0 to -60
    near zero  |d| from 1e-5 to 0.005
    neighbours one token up to 60 nats, next to tokens that are 30 nats from the reference
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.verify.extremes import DISTANCE_STEP, LARGER_LOGP, MAX_DISTANCE, SideLimits
from klinic.verify.identify import GradientIdentity
from klinic.verify.loading import UserFunction
from klinic.verify.row_pulls import evaluate_pulls, evaluate_pulls_in_pairs
from klinic.verify.toy_policies import COMPLETION_LENGTH

REACHABLE_DISTANCE = (
    60.0  # nats: log-prob distance to the reference that abandoned tokens can reach
)
CERTAIN_LOGPS = [-1e-4, -1e-3, -1e-2, -0.025]
NEIGHBOUR_K1 = 30.0
NEIGHBOUR_LOGP = -1.0
# Relative to the pull, and absolute per nat of the log-probs; float64 is more precise until it
# cancels, float32 rounds a log-prob of -30 by 1e-6.
PULL_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
ROUNDING = {torch.float64: 1e-12, torch.float32: 4e-6}
NEAR_ZERO_TOLERANCE = 1e-2

EXPECTED_PULLS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_token": lambda d: -d,
    "reverse_sequence": lambda d: -d,
    "forward_token": lambda d: -torch.expm1(d),
}
EARLIER_PULLS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_token": torch.zeros_like,
    "reverse_sequence": lambda d: -d,
}

Points = Float[Tensor, "N"]


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where a function leaves its identified gradient; every field is empty if it never does."""

    departs_at: SideLimits
    reverses_at: SideLimits
    """Smallest distance at which it pushes away from the reference."""
    both_rare_below: float | None = None
    """It departs where both log-probs are below this."""
    certain_above: float | None = None
    """It departs on tokens of the policy with a log-prob above this."""
    near_zero_below: float | None = None
    """It departs for |d| below this."""
    next_to_far_tokens: bool = False
    """It departs at a token whose neighbours are far from the reference."""

    @property
    def is_within_reach(self) -> bool:
        """Whether it departs at a distance that tokens can reach."""
        return (
            self.departs_at.reached_within(REACHABLE_DISTANCE)
            or self.both_rare_below is not None
            or self.certain_above is not None
            or self.near_zero_below is not None
            or self.next_to_far_tokens
        )


@dataclass(frozen=True, kw_only=True)
class _Points:
    """One token per row at chosen log-probs, its neighbours at a fixed k1."""

    logp: Points
    logp_ref: Points
    neighbour_k1: float = 0.0
    position: int = 1

    @property
    def d(self) -> Points:
        """Log ref minus log policy."""
        return self.logp_ref - self.logp


@dataclass(frozen=True, kw_only=True)
class ScanGrid:
    """The steps of a scan in nats, and its number of points next to the reference."""

    max_distance: float
    line: float
    plane: float
    neighbours: float
    num_near_zero: int


FINE_GRID = ScanGrid(
    max_distance=MAX_DISTANCE, line=DISTANCE_STEP, plane=0.25, neighbours=0.1, num_near_zero=200
)
PAIR_GRID = ScanGrid(
    max_distance=REACHABLE_DISTANCE, line=0.5, plane=5.0, neighbours=10.0, num_near_zero=10
)


@dataclass(frozen=True, kw_only=True)
class PullScan:
    """Compares the pull of a function with an identified gradient, in one dtype."""

    function: UserFunction
    identity: GradientIdentity
    input_dtype: torch.dtype
    compute_dtype: torch.dtype
    """Dtype in which the function computes: sets the tolerance."""
    in_pairs: bool = False
    """Whether it is called on pairs of completions."""

    @property
    def grid(self) -> ScanGrid:
        """The points of the scan: a call for each pair is slow."""
        return PAIR_GRID if self.in_pairs else FINE_GRID

    def find_departure(self) -> Departure | None:
        """Scan all points; None for an identity without a known pull."""
        if self.identity.target not in EXPECTED_PULLS:
            return None
        above, below = (self._scan_side(sign) for sign in (1.0, -1.0))
        departs_at = SideLimits(above=above[0], below=below[0])
        reverses_at = SideLimits(above=above[1], below=below[1])
        if self.identity.target not in EARLIER_PULLS:  # a forward KL: conditional in any case
            return Departure(departs_at=departs_at, reverses_at=reverses_at)
        plane = self._scan_plane(departs_at)
        return Departure(
            departs_at=departs_at,
            reverses_at=reverses_at,
            both_rare_below=plane.both_rare_below,
            certain_above=plane.certain_above,
            near_zero_below=self._scan_near_zero(),
            next_to_far_tokens=self._departs_next_to_far_tokens(departs_at),
        )

    def _scan_side(self, sign: float) -> tuple[float | None, float | None]:
        step = self.grid.line
        d = sign * torch.arange(step, self.grid.max_distance, step, dtype=torch.float64)
        points = _points_at_distance(d, larger_logp=LARGER_LOGP)
        compared = self._compare(points)
        reverses = compared.departs & (compared.pull * compared.expected < 0)
        return _first_distance(d, compared.departs), _first_distance(d, reverses)

    def _scan_plane(self, edges: SideLimits) -> "_PlaneLimits":
        levels = -torch.arange(0.05, REACHABLE_DISTANCE, self.grid.plane, dtype=torch.float64)
        levels = torch.cat([levels.new_tensor(CERTAIN_LOGPS), levels])
        logp, logp_ref = torch.meshgrid(levels, levels, indexing="ij")
        points = _Points(logp=logp.flatten(), logp_ref=logp_ref.flatten())
        departs = self._compare(points).departs & edges.contains(
            points.d, margin=self.grid.line + 0.245
        )
        is_certain = torch.maximum(points.logp, points.logp_ref) > LARGER_LOGP
        rare = torch.maximum(points.logp, points.logp_ref)[departs & ~is_certain]
        certain = points.logp[departs & is_certain]
        return _PlaneLimits(
            both_rare_below=round(float(rare.max()), 2) if len(rare) else None,
            certain_above=float(f"{float(certain.min()):.1g}") if len(certain) else None,
        )

    def _scan_near_zero(self) -> float | None:
        d = torch.logspace(-5, -2.3, self.grid.num_near_zero, dtype=torch.float64)
        largest = 0.0
        for larger_logp in (LARGER_LOGP, -6.0):
            points = _points_at_distance(torch.cat([d, -d]), larger_logp=larger_logp)
            departs = self._compare(points, near_zero=True).departs
            distances = points.d.abs()[departs]
            largest = max([largest, *distances.tolist()])
        return float(f"{largest:.1e}") if largest else None

    def _departs_next_to_far_tokens(self, edges: SideLimits) -> bool:
        margin = 0.2 + self.grid.line
        return any(
            bool((self._compare(points).departs & edges.contains(points.d, margin=margin)).any())
            for points in _points_next_to_far_tokens(self.grid.neighbours)
        )

    def _compare(self, points: _Points, *, near_zero: bool = False) -> "_Comparison":
        """Compare the pull on the chosen tokens, and on the tokens before them."""
        logp, logp_ref = _make_rows(points, self.input_dtype)
        evaluate = evaluate_pulls_in_pairs if self.in_pairs else evaluate_pulls
        evaluated = evaluate(self.function, logp, logp_ref)
        pulls = evaluated.pull.double()
        own, target, scale = points.position, str(self.identity.target), self.identity.scale
        d = (logp_ref.double() - logp.double())[:, own]  # after rounding to the input dtype
        expected = scale * EXPECTED_PULLS[target](d)
        size = logp.double().abs().sum(-1) + logp_ref.double().abs().sum(-1)
        compared = {own: expected}
        if target in EARLIER_PULLS:
            compared |= dict.fromkeys(range(own), scale * EARLIER_PULLS[target](d))
        departs = ~evaluated.value.reshape(len(d), -1).isfinite().all(-1)
        for column, column_expected in compared.items():
            residual = pulls[:, column] - column_expected
            residual = residual - residual[_nearest_to_reference(points)].median()
            # NaN departs
            departs |= ~(residual.abs() <= self._tolerance(column_expected, size, near_zero))
        return _Comparison(departs=departs, pull=pulls[:, own], expected=expected)

    def _tolerance(self, expected: Tensor, size: Tensor, near_zero: bool) -> Tensor:
        scale = abs(self.identity.scale)
        relative = NEAR_ZERO_TOLERANCE if near_zero else PULL_TOLERANCE[self.compute_dtype]
        rounding = ROUNDING[self.compute_dtype] * (1 + size)
        if self.compute_dtype == torch.float64 and not near_zero:
            rounding = rounding + relative
        return relative * expected.abs() + rounding * scale


@dataclass(frozen=True, kw_only=True)
class _PlaneLimits:
    both_rare_below: float | None
    certain_above: float | None


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    departs: Tensor
    pull: Tensor
    expected: Tensor


def _nearest_to_reference(points: _Points) -> Tensor:
    """Return the points that fix the constant: the ordinary tokens nearest to d = 0."""
    distance = (points.logp - LARGER_LOGP).abs() + (points.logp_ref - LARGER_LOGP).abs()
    return distance.argsort()[:9]


def _points_at_distance(d: Points, *, larger_logp: float) -> _Points:
    return _Points(logp=larger_logp - d.clamp(min=0), logp_ref=larger_logp + d.clamp(max=0))


def _points_next_to_far_tokens(step: float) -> Iterator[_Points]:
    d = torch.arange(-REACHABLE_DISTANCE, REACHABLE_DISTANCE, step, dtype=torch.float64)
    for neighbour_k1 in (-NEIGHBOUR_K1, 0.0, NEIGHBOUR_K1):
        for position in range(COMPLETION_LENGTH):
            points = _points_at_distance(d, larger_logp=LARGER_LOGP)
            yield _Points(
                logp=points.logp,
                logp_ref=points.logp_ref,
                neighbour_k1=neighbour_k1,
                position=position,
            )


def _make_rows(points: _Points, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (len(points.logp), COMPLETION_LENGTH)
    logp, logp_ref = (torch.full(shape, NEIGHBOUR_LOGP, dtype=torch.float64) for _ in range(2))
    logp += min(points.neighbour_k1, 0.0)
    logp_ref -= max(points.neighbour_k1, 0.0)
    logp[:, points.position], logp_ref[:, points.position] = points.logp, points.logp_ref
    return logp.to(dtype), logp_ref.to(dtype)


def _first_distance(d: Tensor, condition: Tensor) -> float | None:
    indices = condition.nonzero()
    return round(float(d[int(indices[0])]), 3) if len(indices) else None
