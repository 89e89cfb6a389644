"""Samples of a group that share a random stream: equal to one another in every group."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Float

from klinic.checks.base import Case
from klinic.checks.measures import equal_completions, float64_column, row_numbers
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.maths.arrays import segment_sum

MAX_LOG_CHANCE = -20.0  # of a pair of samples that is equal in every group
MIN_GROUPS = 3  # groups

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSamples:
    """Two samples, by their numbers within a group, that are equal in every group."""

    pair: Pair
    num_groups: int
    log_chance: float
    """Log-probability that the second of them repeats the first in every group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EqualPairs:
    """The pairs of samples that are equal in every group of a step, with their log-chance."""

    generation: int
    """Hash of the tokens: updates on one generation record the same ones again."""
    num_groups: int
    log_chance: dict[Pair, float]


def find_twin_samples(case: Case) -> TwinSamples | None:
    """Return the least probable pair of samples that is equal in every recent group."""
    records = [r for r in case.recent_records if r.sample is not None and r.logp_old is not None]
    steps = {step.generation: step for r in records for step in [case.measure_once(_find_pairs, r)]}
    num_groups = sum(step.num_groups for step in steps.values())
    if num_groups < MIN_GROUPS:
        return None
    common = set.intersection(*(set(step.log_chance) for step in steps.values()))
    log_chance = {
        pair: sum(step.log_chance[pair] for step in steps.values()) for pair in sorted(common)
    }
    if not log_chance:
        return None
    pair = min(log_chance, key=lambda pair: log_chance[pair])
    samples = len(np.unique(np.concatenate([r.sample for r in records if r.sample is not None])))
    if log_chance[pair] + np.log(samples * (samples - 1) / 2) > MAX_LOG_CHANCE:
        return None
    return TwinSamples(pair=pair, num_groups=num_groups, log_chance=log_chance[pair])


def _find_pairs(record: StepRecord) -> _EqualPairs:
    sample, logp = np.asarray(record.sample), largest_row_logp(record)
    num_groups = len(np.unique(record.group))
    chances: dict[Pair, list[float]] = {}
    for rows in equal_completions(record):
        for one, other in combinations(sorted(rows, key=lambda row: int(sample[row])), 2):
            pair = int(sample[one]), int(sample[other])
            chances.setdefault(pair, []).append(min(float(logp[one]), 0.0))
    return _EqualPairs(
        generation=hash(record.token_ids.tobytes()),
        num_groups=num_groups,
        log_chance={pair: sum(logs) for pair, logs in chances.items() if len(logs) == num_groups},
    )


def largest_row_logp(record: StepRecord) -> Float[np.ndarray, "B"]:
    """Return the log-prob of each row under the side that finds it likelier.

    Rows are drawn by the sampler; the learner's side may be wrong, and is all that some runs have.
    """
    learner = row_logp(record, "logp_old")
    if record.logp_sampler is None or not np.isfinite(record.logp_sampler).all():
        return learner
    return np.asarray(np.maximum(learner, row_logp(record, "logp_sampler")))


def row_logp(record: StepRecord, column: str) -> Float[np.ndarray, "B"]:
    """Return the log-prob of each row's own tokens; those that a tool inserts do not count."""
    logp = np.nan_to_num(float64_column(record, column))
    if record.emitted_by is not None:
        logp = np.where(record.emitted_by == EmittedBy.POLICY, logp, 0.0)
    return np.asarray(segment_sum(logp, row_numbers(record), record.num_rows))
