"""Finds where the importance weight of a function leaves the ratio of policy to sampler.

The worlds of an older policy reach ratios of about 10. A function can be right there and wrong
beyond, so its weight is measured on rows of three tokens with chosen log-probs, for ratios from
exp(-10) to exp(10): of each token alone, and of all tokens at once. The weight of a token is the
change of its pull when the reference of that token moves by one nat.

    cap    the weight is min(ratio, c), and the pull is weight times k1: bounded, and as documented
    mask   no pull above a ratio
    other  any other weight, such as a floor, a sign that flips, or a cap whose gradient is another
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.verify.loading import UserFunction
from klinic.verify.row_pulls import evaluate_pulls

Form = Literal["token", "sequence", "per_decision", "prefix"]

MAX_LOG_RATIO = 10.0
LOG_RATIO_STEP = 0.05
REFINEMENT = 500  # points between two neighbours of the grid, to name a threshold to four digits
MIN_CAP = 1.1  # a lower one is active in the worlds of a slight drift
LARGER_LOGP = -0.5  # the larger of the log-probs under policy and sampler
# k1 of the three tokens: sums of its parts differ, so that a future sum is recognisable. With both
# signs, as a clip of the surrogate depends on the sign.
NEAR_ROWS = ((0.37, 0.83, 0.59), (0.37, -0.83, 0.59))
FAR_ROWS = ((0.37, 14.0, 0.59), (0.37, -14.0, 0.59))  # float32 may cancel here at any ratio
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
CAP_TOLERANCE = 1e-4
NO_WEIGHT = 1e-6
OWN = 1  # the token whose pull is measured

Points = Float[Tensor, "N"]


@dataclass(frozen=True, kw_only=True)
class RatioRange:
    """Where the weight of a function is not the ratio; every field is None if it always is."""

    cap: float | None = None
    """The value at which the ratio is held."""
    masked_above: float | None = None
    """The ratio above which a token gets no gradient."""
    departs_above: float | None = None
    """The ratio above which the gradient is another one."""
    departs_below: float | None = None
    """The ratio below which the gradient is another one."""
    reverses_at: float | None = None
    """The ratio nearest to 1 at which the weight has the wrong sign."""

    @property
    def is_right(self) -> bool:
        """Whether the weight is the ratio, or the ratio held at a cap."""
        limits = (self.masked_above, self.departs_above, self.departs_below, self.reverses_at)
        return all(limit is None for limit in limits)


@dataclass(frozen=True, kw_only=True)
class _Path:
    """Rows along which the ratio of one token, or of all tokens, changes."""

    k1: tuple[float, ...]
    moved: tuple[int, ...]
    power: int
    """The expected weight is the ratio to this power."""
    has_equal_pull: bool
    """Whether the pull is also proportional to that power, and not only the weight."""


@dataclass(frozen=True, kw_only=True)
class _Weights:
    log_ratio: Points
    weight: Points
    pull: Points
    is_finite: Tensor
    path: _Path


def scan_ratios(
    function: UserFunction, form: Form, scale: float, compute_dtype: torch.dtype
) -> RatioRange:
    """Return where the weight leaves the ratio times the scale, over all paths and input dtypes."""
    ranges = [
        _RatioScan(
            function=function, scale=scale, input_dtype=inputs, tolerance=TOLERANCE[computes]
        ).scan(path)
        for inputs, computes, rows in (
            (torch.float64, compute_dtype, NEAR_ROWS),
            (torch.float64, compute_dtype, FAR_ROWS if compute_dtype == torch.float64 else ()),
            (torch.float32, torch.float32, NEAR_ROWS),
        )
        for path in _paths(form, rows)
    ]
    return RatioRange(
        cap=_smallest(found.cap for found in ranges),
        masked_above=_smallest(found.masked_above for found in ranges),
        departs_above=_smallest(found.departs_above for found in ranges),
        departs_below=_largest(found.departs_below for found in ranges),
        reverses_at=_nearest_to_one([found.reverses_at for found in ranges]),
    )


def _paths(form: Form, rows: Iterable[tuple[float, ...]]) -> Iterator[_Path]:
    """Yield rows with the power of the ratio that the own token is weighted with.

    The first tokens enter the ratio of a prefix, all tokens that of a completion. Per decision, the
    k1 of a later token is in the pull with a ratio of its own.
    """
    enters = {
        "token": {OWN},
        "prefix": {0, OWN},
        "per_decision": {0, OWN},
        "sequence": {0, OWN, 2},
    }[form]
    for k1 in rows:
        for moved in ((OWN,), (0,), (2,), (0, OWN, 2)):
            yield _Path(
                k1=k1,
                moved=moved,
                power=len(enters & set(moved)),
                has_equal_pull=form != "per_decision" or 2 not in moved,
            )


@dataclass(frozen=True, kw_only=True)
class _RatioScan:
    """Measures the weight of a function along one path, in one dtype."""

    function: UserFunction
    scale: float
    input_dtype: torch.dtype
    tolerance: float

    def scan(self, path: _Path) -> RatioRange:
        """Classify the weights above and below a ratio of 1."""
        num_steps = round(MAX_LOG_RATIO / LOG_RATIO_STEP)
        distance = LOG_RATIO_STEP * torch.arange(num_steps + 1, dtype=torch.float64)
        below = self._first_departure(self._measure(-distance, path))
        reverses = [self._first_reversal(self._measure(s * distance, path)) for s in (1, -1)]
        departs_below = None if below is None else self._refine(below, path)
        above = self._classify_above(self._measure(distance, path))
        return RatioRange(
            cap=above.cap,
            masked_above=above.masked_above,
            departs_above=above.departs_above,
            departs_below=departs_below,
            reverses_at=_nearest_to_one(reverses),
        )

    def _classify_above(self, weights: _Weights) -> RatioRange:
        start = self._first_departure(weights)
        if start is None:
            return RatioRange()
        beyond = weights.log_ratio >= start - 1e-9
        largest = float(weights.weight[beyond].abs().max())
        cap = float(weights.weight[-1])
        if self._is_capped(weights, cap):
            return RatioRange(cap=float(f"{cap:.6g}"))
        threshold = self._refine(start, weights.path)
        pull = float(weights.pull[beyond].abs().max())
        if bool(weights.is_finite[beyond].all()) and max(largest, pull) < NO_WEIGHT:
            return RatioRange(masked_above=threshold)
        return RatioRange(departs_above=threshold)

    def _is_capped(self, weights: _Weights, cap: float) -> bool:
        """Whether the weight is min(ratio, cap), times k1 of this, the later or all tokens."""
        if not cap >= MIN_CAP:
            return False
        expected = (weights.path.power * weights.log_ratio).exp()
        power = max(weights.path.power, 1)
        by_token = weights.log_ratio.exp().clamp(max=cap ** (1 / power)) ** power
        return any(self._is_held(weights, held) for held in (expected.clamp(max=cap), by_token))

    def _is_held(self, weights: _Weights, held: Points) -> bool:
        tolerance = max(self.tolerance, CAP_TOLERANCE)
        k1 = weights.path.k1
        totals = (k1[OWN], sum(k1[OWN:]), sum(k1))
        pull = weights.pull / held
        has_k1 = not weights.path.has_equal_pull or any(
            bool(((pull - total).abs() <= tolerance * (1 + abs(total))).all()) for total in totals
        )
        return has_k1 and torch.allclose(weights.weight, held, rtol=tolerance, atol=tolerance)

    def _first_departure(self, weights: _Weights) -> float | None:
        """Return the first log-ratio at which weight or pull is not proportional to the ratio."""
        expected = (weights.path.power * weights.log_ratio).exp()
        weight, pull = weights.weight / expected, weights.pull / expected
        size = 1 + abs(weights.path.k1[OWN])
        follows = weights.is_finite & ((weight - 1).abs() <= self.tolerance * size)
        if weights.path.has_equal_pull:
            follows &= (pull - pull[0]).abs() <= self.tolerance * (size + pull[0].abs())
        departing = (~follows).nonzero()
        return float(weights.log_ratio[int(departing[0])]) if len(departing) else None

    def _first_reversal(self, weights: _Weights) -> float | None:
        expected = (weights.path.power * weights.log_ratio).exp()
        reversed_at = (weights.weight < -self.tolerance * expected).nonzero()
        if not len(reversed_at):
            return None
        return self._refine(float(weights.log_ratio[int(reversed_at[0])]), weights.path)

    def _refine(self, log_ratio: float, path: _Path) -> float:
        """Return the ratio of the first departure, between this point and the one before."""
        before = log_ratio - LOG_RATIO_STEP * (1 if log_ratio > 0 else -1)
        points = torch.linspace(before, log_ratio, REFINEMENT, dtype=torch.float64)
        found = self._first_departure(self._measure(points, path)) if log_ratio else None
        exact = log_ratio if found is None else found
        return float(f"{math.exp(exact * max(path.power, 1)):.3g}")

    def _measure(self, log_ratio: Points, path: _Path) -> _Weights:
        k1 = torch.tensor(path.k1, dtype=torch.float64).expand(len(log_ratio), -1)
        shift = torch.zeros_like(k1)
        shift[:, list(path.moved)] = log_ratio[:, None]
        logp_old = LARGER_LOGP - shift.clamp(min=0)
        logp = LARGER_LOGP + shift.clamp(max=0)
        logp_ref = logp - k1
        step = 1.0 if path.k1[OWN] > 0 else -1.0  # away from zero: the sign of k1 stays
        moved_ref = logp_ref.clone()
        moved_ref[:, OWN] -= step
        rows = [
            evaluate_pulls(self.function, *(x.to(self.input_dtype) for x in (logp, ref, logp_old)))
            for ref in (logp_ref, moved_ref)
        ]
        pull, moved_pull = (row.pull[:, OWN].double() / self.scale for row in rows)
        is_finite = torch.stack(
            [row.value.reshape(len(log_ratio), -1).isfinite().all(-1) for row in rows]
        ).all(0)
        return _Weights(
            log_ratio=log_ratio,
            weight=(moved_pull - pull) / step,
            pull=pull,
            is_finite=is_finite & pull.isfinite() & moved_pull.isfinite(),
            path=path,
        )


def _smallest(ratios: Iterable[float | None]) -> float | None:
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _largest(ratios: Iterable[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _nearest_to_one(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return min(known, key=lambda ratio: abs(math.log(ratio)), default=None)
