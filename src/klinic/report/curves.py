"""The metrics of a run as a report draws them: column by column, bounded, whatever was written.

A run may log eighty metrics for weeks. Only those that a picture shows are kept, as arrays, and a
long curve is thinned to the least and the largest value of each stretch, so that no spike is lost.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from klinic.evidence.numbers import as_number, as_step
from klinic.report.gaps import LARGEST

SHOWN = (
    *("reward", "eval/accuracy", "kl", "kl_exact/mean", "kl_coef", "entropy"),
    *("grad_norm", "grad_norm_clipped", "completions/mean_length", "completions/parse_rate"),
    "completions/clipped_ratio",
)
MOST_REWARDS = 12  # reward functions; more curves cannot be told apart
MOST_POINTS = 2_000  # of a curve; a page is half as many pixels wide
Series = tuple[list[int], list[float]]


class Curves:
    """Metrics by name, each over its own steps."""

    def __init__(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self._steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self.reward_names: list[str] = []
        """Reward functions that the run has means of, the first ones."""
        for entry in entries:
            step = as_step(entry.get("step"))
            if step is not None:
                self._add(step, entry)

    def series(self, name: str) -> Series:
        """Return the steps in which a metric was a number, in order, and the numbers.

        >>> Curves([{"step": 2, "kl": 1}, {"step": 1, "kl": 2}, {"step": 2, "kl": 3}]).series("kl")
        ([1, 2], [2.0, 3.0])
        """
        steps, values = self._column(name)
        return steps.tolist(), values.tolist()

    def thinned(self, name: str) -> Series:
        """Return a curve of no more points than can be seen, with every spike."""
        steps, values = self._column(name)
        chosen = _extremes(values)
        return steps[chosen].tolist(), values[chosen].tolist()

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a metric step by step."""
        for step, value in zip(*self.series(name), strict=True):
            yield {"step": step, name: value}

    def _add(self, step: int, entry: Mapping[str, Any]) -> None:
        names = [name for name in SHOWN if name in entry]
        rewards = [name for name in entry if name.startswith("rewards/") and self._is_reward(name)]
        for name in (*names, *rewards):
            value = as_number(entry[name])
            if value is not None:
                self._steps.setdefault(name, array("q")).append(step)
                self._values.setdefault(name, array("d")).append(
                    value if abs(value) <= LARGEST else math.nan  # a picture has no such scale
                )

    def _is_reward(self, name: str) -> bool:
        """Whether a metric is the mean of a reward function that is shown."""
        parts = name.split("/")
        if len(parts) != 3 or parts[2] != "mean":
            return False
        if parts[1] not in self.reward_names and len(self.reward_names) < MOST_REWARDS:
            self.reward_names.append(parts[1])
        return parts[1] in self.reward_names

    def _column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a metric in the order of steps; the last value of a step counts."""
        steps = np.asarray(self._steps.get(name, array("q")), np.int64)[::-1]
        values = np.asarray(self._values.get(name, array("d")), np.float64)[::-1]
        unique, first = np.unique(steps, return_index=True)
        return unique, values[first]


def _extremes(values: np.ndarray) -> np.ndarray:
    """Return the places of the least and the largest value of each stretch, and of both ends.

    >>> _extremes(np.array([1.0, 2.0])).tolist()
    [0, 1]
    """
    num = len(values)
    if num <= MOST_POINTS:
        return np.arange(num)
    places = {0, num - 1}
    for part in np.array_split(np.arange(num), MOST_POINTS // 2):
        known = part[np.isfinite(values[part])]
        known = known if known.size else part
        places |= {int(known[np.argmin(values[known])]), int(known[np.argmax(values[known])])}
    return np.array(sorted(places))
