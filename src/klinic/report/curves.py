"""Metrics of a run as bounded curves, one array per metric.

A run may log eighty metrics for weeks. Only plotted metrics are stored, and a long curve is
downsampled to the minimum and maximum of each interval, so that every spike stays visible.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from klinic.evidence.numbers import as_number, as_step
from klinic.report.logp_gaps import MAX_NATS

PLOTTED_METRICS = (
    *("reward", "eval/accuracy", "kl", "kl_exact/mean", "kl_k1/mean", "kl_coef", "entropy"),
    *("grad_norm", "grad_norm_clipped", "completions/mean_length", "completions/parse_rate"),
    *("completions/clipped_ratio", "frac_reward_zero_std"),
)
STEP_TIMES = ("time/sample", "time/reward", "time/learn")
MAX_REWARDS = 12  # reward functions; more curves cannot be distinguished
MAX_POINTS = 1_000  # points per curve; a page is half as many pixels wide
Series = tuple[list[int], list[float]]


class MetricCurves:
    """Metrics by name, each over its own steps."""

    def __init__(
        self, entries: Iterable[Mapping[str, Any]], plotted: Iterable[str] = PLOTTED_METRICS
    ) -> None:
        self._plotted = dict.fromkeys(plotted)
        self._steps: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self._values: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.reward_names: list[str] = []
        """Reward functions with a logged mean, up to the limit."""
        self.last_step = 0
        self.seconds = 0.0
        """Sum of the logged step times."""
        for entry in entries:
            step = as_step(entry.get("step"))
            if step is not None:
                self._add_entry(step, entry)

    @property
    def names(self) -> list[str]:
        """The metrics that were logged, plotted ones first and in that order."""
        plotted = [name for name in self._plotted if name in self._steps]
        return [*plotted, *(name for name in self._steps if name not in plotted)]

    def add_series(self, name: str, series: Series) -> None:
        """Add a curve that was measured on the records."""
        self._steps[name] = array("q", series[0])
        self._values[name] = array("d", (min(max(v, -MAX_NATS), MAX_NATS) for v in series[1]))

    def series(self, name: str) -> Series:
        """Return the steps at which a metric was logged, in order, and its values.

        >>> lines = [{"step": 2, "kl": 1}, {"step": 1, "kl": 2}, {"step": 2, "kl": 3}]
        >>> MetricCurves(lines).series("kl")
        ([1, 2], [2.0, 3.0])
        """
        steps, values = self._sorted_column(name)
        return steps.tolist(), values.tolist()

    def downsampled_series(self, name: str) -> Series:
        """Return a curve of about `MAX_POINTS` points that preserves every spike."""
        steps, values = self._sorted_column(name)
        chosen = _extreme_indices(values)
        return steps[chosen].tolist(), values[chosen].tolist()

    def iter_rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a metric step by step."""
        for step, value in zip(*self.series(name), strict=True):
            yield {"step": step, name: value}

    def _add_entry(self, step: int, entry: Mapping[str, Any]) -> None:
        self.last_step = max(self.last_step, step)
        for name in STEP_TIMES:
            seconds = as_number(entry.get(name))
            self.seconds += seconds if seconds is not None and 0 <= seconds < MAX_NATS else 0
        rewards = [name for name in entry if name.startswith("rewards/") and self._is_reward(name)]
        for name in (*(self._plotted.keys() & entry.keys()), *rewards):
            value = as_number(entry[name])
            if value is not None:
                self._steps[name].append(step)
                # beyond any plottable scale
                self._values[name].append(value if abs(value) <= MAX_NATS else math.nan)

    def _is_reward(self, name: str) -> bool:
        """Whether a metric is the mean of a plotted reward function."""
        parts = name.split("/")
        if len(parts) != 3 or parts[2] != "mean":
            return False
        if parts[1] not in self.reward_names and len(self.reward_names) < MAX_REWARDS:
            self.reward_names.append(parts[1])
        return parts[1] in self.reward_names

    def _sorted_column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a metric in step order; the last value of a step wins."""
        steps = np.asarray(self._steps.get(name, array("q")), np.int64)[::-1]
        values = np.asarray(self._values.get(name, array("d")), np.float64)[::-1]
        unique, first = np.unique(steps, return_index=True)
        return unique, values[first]


def _extreme_indices(values: np.ndarray) -> np.ndarray:
    """Return the indices of both ends and of each interval's minimum and maximum.

    >>> _extreme_indices(np.array([1.0, 2.0])).tolist()
    [0, 1]
    """
    num = len(values)
    if num <= MAX_POINTS:
        return np.arange(num)
    indices = {0, num - 1}
    for part in np.array_split(np.arange(num), MAX_POINTS // 2):
        finite = part[np.isfinite(values[part])]
        finite = finite if finite.size else part
        indices |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
    return np.array(sorted(indices))
