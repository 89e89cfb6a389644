"""What is measured over the trained tokens of a step: sums that blocks and processes add up.

A measure sees the tokens block by block. The results of all processes are merged before it returns
metrics, so whether a metric exists does not depend on the rows that one process holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from klinic.evidence.merging import Merge
from klinic.evidence.record import StepRecord
from klinic.evidence.token_tally import TokenDistribution, TokenTally, merge_tallies
from klinic.evidence.trained_tokens import TrainedTokens, sum_rows, trained_blocks
from klinic.maths import kl
from klinic.maths.ratio import sequence_log_ratio

TAIL_FRACTION = 0.001  # fraction of tokens in `top_share`
LARGE_TOKEN_KL = 1.0  # nats: the token is e times as likely under one policy as under the other
QUANTILE = 0.99
MAX_LOG_RATIO = 50.0  # above any clip bound, but its exponential is finite


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTokens:
    """What is known of the trained tokens of all processes, for one measure."""

    num_tokens: int
    distributions: list[TokenDistribution | None]
    """Of its tallies; None without a value."""


@runtime_checkable
class Measure(Protocol):
    """Something to measure over the trained tokens."""

    sums: Float[np.ndarray, "_"]
    """What processes add up."""
    extremes: Float[np.ndarray, "_"]
    """Of what processes keep the largest; merged before the sums."""
    tallies: list[TokenTally]
    """The distributions that it needs."""

    def add(self, tokens: TrainedTokens) -> None:
        """Add the tokens of a block."""

    def rescale(self, extremes: Float[np.ndarray, "_"]) -> None:
        """Adapt the sums to the extremes of all processes."""

    def metrics(self, merged: MergedTokens) -> dict[str, float]:
        """Return the metrics; sums and extremes are those of all processes by then."""


def measure_tokens(
    record: StepRecord, measures: Sequence[Measure], num_tokens: int, merge: Merge
) -> dict[str, float]:
    """Return the metrics of all measures; `num_tokens` is of all processes, whose rows differ."""
    with np.errstate(invalid="ignore", over="ignore"):  # of values that are not finite
        for tokens in trained_blocks(record):
            for measure in measures:
                measure.add(tokens)
        _merge_numbers(measures, merge)
        tallies = [tally for measure in measures for tally in measure.tallies]
        found = iter(merge_tallies(tallies, merge))
        metrics: dict[str, float] = {}
        for measure in measures:
            distributions = [next(found) for _ in measure.tallies]
            merged = MergedTokens(num_tokens=num_tokens, distributions=distributions)
            metrics |= measure.metrics(merged)
    return metrics


def _merge_numbers(measures: Sequence[Measure], merge: Merge) -> None:
    """Replace sums and extremes by those of all processes, with one exchange of each."""
    if merge.size == 1:
        return
    ends = np.cumsum([len(measure.extremes) for measure in measures])[:-1]
    largest = np.split(merge.max(np.concatenate([m.extremes for m in measures])), ends)
    for measure, extremes in zip(measures, largest, strict=True):
        measure.rescale(extremes)
    ends = np.cumsum([len(measure.sums) for measure in measures])[:-1]
    totals = np.split(merge.sum(np.concatenate([m.sums for m in measures])), ends)
    for measure, sums in zip(measures, totals, strict=True):
        measure.sums = sums


class _Sums:
    """A measure that is made of sums alone."""

    def __init__(self, num: int) -> None:
        self.sums = np.zeros(num)
        self.extremes = np.zeros(0)
        self.tallies: list[TokenTally] = []

    def rescale(self, extremes: Float[np.ndarray, "_"]) -> None:
        """Do nothing: no extreme scales the sums."""


class ColumnMeans(_Sums):
    """The means of some columns."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        super().__init__(len(columns))
        self._columns = columns

    def add(self, tokens: TrainedTokens) -> None:
        """Add the tokens of a block."""
        self.sums += [tokens.select(values).sum() for values in self._columns.values()]

    def metrics(self, merged: MergedTokens) -> dict[str, float]:
        """Return the mean of each column under its name."""
        if not merged.num_tokens:
            return {}
        return {
            n: float(s / merged.num_tokens) for n, s in zip(self._columns, self.sums, strict=True)
        }


class SampledKL(_Sums):
    """KL of the policy at `logp_old` to another model: k3, k1 and, where it was scored, exact."""

    def __init__(
        self,
        names: dict[str, str],
        *,
        logp_old: np.ndarray,
        logp_other: np.ndarray,
        kl_exact: np.ndarray | None,
        num_tokens: int,
    ) -> None:
        """Take the metrics of the mean k3 (`mean`) and of the distributions (`k3`, `k1`, ...)."""
        super().__init__(1)
        self._names = names
        self._columns = logp_old, logp_other, kl_exact
        kinds = [n for n in ("k3", "k1", "exact") if n in names]
        self._kinds = [n for n in kinds if n != "exact" or kl_exact is not None]
        self.tallies = [make_tally(num_tokens) for _ in self._kinds]

    def add(self, tokens: TrainedTokens) -> None:
        """Add the tokens of a block."""
        logp_old, logp_other, kl_exact = self._columns
        both = {"logp_p": tokens.select(logp_old), "logp_q": tokens.select(logp_other)}
        values = {"k3": kl.k3(**both), "k1": kl.k1(**both)}
        if kl_exact is not None:
            values["exact"] = tokens.select(kl_exact)
        self.sums += values["k3"].sum()
        for kind, tally in zip(self._kinds, self.tallies, strict=True):
            tally.add(values[kind], tokens.row_offsets)

    def metrics(self, merged: MergedTokens) -> dict[str, float]:
        """Return mean k3 and the distributions."""
        if not merged.num_tokens:
            return {}
        metrics = {self._names["mean"]: float(self.sums[0] / merged.num_tokens)}
        for kind, distribution in zip(self._kinds, merged.distributions, strict=True):
            metrics |= name_distribution(self._names[kind], distribution)
        return metrics


def make_tally(num_tokens: int) -> TokenTally:
    """Return the tally of a KL per token."""
    return TokenTally(
        num_tokens, quantile=QUANTILE, tail_fraction=TAIL_FRACTION, limit=LARGE_TOKEN_KL
    )


def name_distribution(name: str, found: TokenDistribution | None) -> dict[str, float]:
    """Return the metrics of a distribution; none without a value."""
    if found is None:
        return {}
    return {
        f"{name}/mean": found.mean,
        f"{name}/min": found.smallest,
        f"{name}/max": found.largest,
        f"{name}/p99": found.quantile,
        f"{name}/top_share": found.tail_share,
        f"{name}/share_above": found.share_above,
        f"{name}/per_sequence": found.row_mean,
        f"{name}/per_sequence_max": found.row_largest,
    }


class SamplerGap(_Sums):
    """Difference of `logp_old` and the sampler's log-probs, where it reported a finite one."""

    def __init__(self, *, logp_old: np.ndarray, logp_sampler: np.ndarray) -> None:
        super().__init__(4)
        self.extremes = np.full(2, -np.inf)
        self._columns = logp_old, logp_sampler

    def add(self, tokens: TrainedTokens) -> None:
        """Add the tokens of a block."""
        logp_old, logp_sampler = self._columns
        reported = tokens.select(logp_sampler)
        gap = tokens.select(logp_old) - reported
        is_finite = np.isfinite(reported)
        if not is_finite.all():
            gap = gap[is_finite]
        if not gap.size:
            return
        size, largest = np.abs(gap), gap.max()
        self.rescale(np.maximum(self.extremes, [largest, size.max()]))
        weight = np.exp(gap - self.extremes[0])
        self.sums += gap.size, size.sum(), weight.sum(), np.square(weight).sum()

    def rescale(self, extremes: Float[np.ndarray, "_"]) -> None:
        """Scale the weights so that the largest of all is 1."""
        factor = np.exp(self.extremes[0] - extremes[0]) if self.sums[0] else 0.0
        self.sums[2:] *= factor, factor * factor
        self.extremes = extremes

    def metrics(self, merged: MergedTokens) -> dict[str, float]:
        """Return mean and largest difference, and the effective sample size."""
        del merged
        num, total, weights, squares = self.sums
        if not num:
            return {}
        return {
            "sampling/sampling_logp_difference/mean": float(total / num),
            "sampling/sampling_logp_difference/max": float(self.extremes[1]),
            "sampling/effective_sample_size": float(weights**2 / (num * squares)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The range in which the loss leaves ratios as they are."""

    low: float
    high: float
    by_sequence: bool = False
    """Whether the loss clips the ratio of the completion (gspo)."""


class Clipping(_Sums):
    """Fractions of tokens below, above and outside the clip range, and the KL of the update."""

    def __init__(
        self, clip: ClipRange, *, logp: np.ndarray, logp_old: np.ndarray, advantage: np.ndarray
    ) -> None:
        super().__init__(3)
        self._clip = clip
        self._columns = logp, logp_old, advantage

    def add(self, tokens: TrainedTokens) -> None:
        """Add the tokens of a block."""
        logp, logp_old, advantage = self._columns
        both = {"logp": tokens.select(logp), "logp_old": tokens.select(logp_old)}
        log_ratio = both["logp"] - both["logp_old"]
        if not log_ratio.any():  # a ratio of 1 is inside any clip range
            return
        clipped = log_ratio
        if self._clip.by_sequence:
            trained = np.ones(tokens.num, np.bool_)
            clipped = sequence_log_ratio(**both, loss_mask=trained, row_offsets=tokens.row_offsets)
        side = tokens.spread_rows(advantage)
        ratio = np.exp(np.minimum(clipped, MAX_LOG_RATIO))
        num_low = np.count_nonzero((ratio < 1 - self._clip.low) & (side < 0))
        num_high = np.count_nonzero((ratio > 1 + self._clip.high) & (side > 0))
        self.sums += num_low, num_high, log_ratio.sum()

    def metrics(self, merged: MergedTokens) -> dict[str, float]:
        """Return the fractions, and the mean log-ratio as `kl_update`."""
        if not merged.num_tokens:
            return {}
        num_low, num_high, log_ratio = self.sums
        return {
            "clip_ratio/low_mean": float(num_low / merged.num_tokens),
            "clip_ratio/high_mean": float(num_high / merged.num_tokens),
            "clip_ratio/region_mean": float((num_low + num_high) / merged.num_tokens),
            "kl_update": float(-(log_ratio / merged.num_tokens)),
        }


class UpdateKL(_Sums):
    """KL(new || old) at tokens of the old policy: k3 of new against old, weighted by the ratio."""

    def __init__(self, *, logp: np.ndarray, logp_old: np.ndarray) -> None:
        super().__init__(1)
        self._columns = logp, logp_old

    def add(self, tokens: TrainedTokens) -> None:
        """Add the tokens of a block."""
        new, old = (tokens.select(column) for column in self._columns)
        self.sums += (np.exp(new - old) * kl.k3(logp_p=new, logp_q=old)).sum()

    def metrics(self, merged: MergedTokens) -> dict[str, float]:
        """Return the mean as `update_kl`."""
        return {"update_kl": float(self.sums[0] / merged.num_tokens) if merged.num_tokens else 0.0}


class PenalizedReward(_Sums):
    """The reward minus a coefficient times the completion's summed k1."""

    def __init__(
        self, *, logp_old: np.ndarray, logp_ref: np.ndarray, reward: np.ndarray, kl_coef: float
    ) -> None:
        super().__init__(3)
        self._columns = logp_old, logp_ref
        self._reward, self._kl_coef = reward, kl_coef

    def add(self, tokens: TrainedTokens) -> None:
        """Add the tokens of a block."""
        logp_old, logp_ref = (tokens.select(column) for column in self._columns)
        k1 = sum_rows(kl.k1(logp_p=logp_old, logp_q=logp_ref), tokens.row_offsets)
        penalized = self._reward[tokens.rows] - self._kl_coef * k1
        known = ~np.isnan(penalized)
        num_finite = np.count_nonzero(np.isfinite(penalized))
        self.sums += np.count_nonzero(known), np.where(known, penalized, 0.0).sum(), num_finite

    def metrics(self, merged: MergedTokens) -> dict[str, float]:
        """Return the mean over the rows that have one."""
        del merged
        num_known, total, num_finite = self.sums
        return {"reward/penalized": float(total / num_known)} if num_finite else {}
