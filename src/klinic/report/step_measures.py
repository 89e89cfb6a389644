"""One number per step from the records: log-prob gaps, trained tokens, equal rewards, lengths.

The curves show these beside the logged metrics, so that a run without metrics has curves too.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.report.logp_gaps import LANES, logp_gap

Series = tuple[list[int], list[float]]


def mean_gap(record: StepRecord, lane: str) -> float | None:
    """Return the mean absolute gap of a lane in nats; None if it was not recorded."""
    gaps = logp_gap(record, lane)
    finite = np.array([]) if gaps is None else np.abs(gaps[np.isfinite(gaps)])
    return float(finite.mean()) if finite.size else None


def trained_fraction(record: StepRecord) -> float | None:
    """Return the fraction of completion tokens that are trained on."""
    return float(record.loss_mask.mean()) if record.num_tokens else None


def equal_groups(record: StepRecord) -> float | None:
    """Return the fraction of prompts whose completions all have the same reward."""
    if record.reward is None or not record.num_rows:
        return None
    rewards = np.nan_to_num(record.reward.astype(np.float64))
    groups, index = np.unique(record.group, return_inverse=True)
    lowest, highest = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(lowest, index, rewards)
    np.maximum.at(highest, index, rewards)
    return float((lowest == highest).mean())


def mean_reward(record: StepRecord) -> float | None:
    """Return the mean reward of the completions that have one."""
    rewards = np.array([]) if record.reward is None else record.reward
    finite = rewards[np.isfinite(rewards)]
    return float(finite.mean()) if finite.size else None


def mean_length(record: StepRecord) -> float | None:
    """Return the mean number of tokens of a completion."""
    return record.num_tokens / record.num_rows if record.num_rows else None


MEASURES: Mapping[str, Callable[[StepRecord], float | None]] = {
    **{f"gap/{lane}": partial(mean_gap, lane=lane) for lane in LANES},
    "recorded/reward": mean_reward,
    "recorded/length": mean_length,
    "recorded/trained": trained_fraction,
    "recorded/equal_groups": equal_groups,
}
"""Measures by name; the names are those of curves on a page."""


class StepMeasures:
    """The measures of the recorded steps that were added."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}

    def add_record(self, record: StepRecord) -> None:
        """Measure a record."""
        for name, measure in MEASURES.items():
            value = measure(record)
            if value is not None:
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(record.step)
                values.append(value)
