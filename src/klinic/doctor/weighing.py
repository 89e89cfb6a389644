"""Weighs causes against one another: a noisy-or network over the checks that failed.

Every set of up to three causes predicts which checks fail. A cause makes its own check fail nearly
always and each check that it `explains` sometimes, the less so the more of the anomaly that check's
own cause accounts for (`Finding.explained`); independently of that, a check fails by accident now
and then. So the probability that check c fails under a set of causes is

    1 - (1 - accident) * product over the causes of (1 - probability that it makes c fail)

and the posterior probability of a set is proportional to its prior and to the product over the
failed checks. A check that passed rules its own cause out, but counts against no other: an effect
can be too small to see. A cause whose evidence was not recorded stays possible if it explains a
failure. One more cause stands for every fault that is not in the catalogue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Float

from klinic.doctor.hypothesis import Hypothesis

PRIOR = 0.02  # of one cause in a run that somebody diagnoses
PRIOR_OF_SETUP = 1e-3  # of a cause of a set-up of which nothing is recorded
DETECTED = 0.95  # a cause makes its own check fail
EFFECT = 0.25  # a cause makes a check fail that it explains; most effects need a severe fault
UNKNOWN = 0.01  # a fault outside the catalogue makes a given check fail: 1 in some 720 blind ones
UNKNOWN_OF_SYMPTOM = (
    0.5  # the same for a symptom: of 6 blind cases with it alone, 5 had other faults
)
ACCIDENT = 1e-3  # a check fails in a healthy run: 1 in some 870 of the blind rounds 3 and 4
ACCIDENT_PER_STEP = 1e-4  # a failure of a single step can be an accident of that step
SPORADIC = 0.01  # a check near its limit fails now and then; most faults show in every step
MIN_UNEXPLAINED = 0.1  # of an anomaly: a formula that fits every token may still be another's
MAX_CAUSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCause:
    """A cause with its posterior probability."""

    hypothesis: Hypothesis
    probability: float


def weigh_causes(hypotheses: Sequence[Hypothesis], absent: frozenset[str]) -> list[WeighedCause]:
    """Return the causes that are possible given the failed checks, the most probable first.

    `absent` are the fields that were not recorded. Probabilities add up to more than 1 where
    several faults are at work.
    """
    failed = [h for h in hypotheses if h.num_failed]
    if not failed:
        return []
    unrecorded = [
        h
        for h in hypotheses
        if not h.num_judged
        and not absent.isdisjoint(h.check.deciding_fields)
        and any(h.explains(effect) for effect in failed)
    ]
    candidates = [*failed, *unrecorded]
    priors = np.array(
        [PRIOR_OF_SETUP if h.check.is_of_setup and not h.num_judged else PRIOR for h in candidates]
        + [PRIOR]  # the unknown
    )
    probabilities = _marginals(
        _failure_probabilities(candidates, failed), _accidents(failed), priors
    )
    weighed = [
        WeighedCause(hypothesis=h, probability=float(p))
        for h, p in zip(candidates, probabilities, strict=False)  # the last one is the unknown
    ]
    return sorted(weighed, key=lambda w: (-round(w.probability, 6), *_rank_key(w.hypothesis)))


def _failure_probabilities(
    candidates: Sequence[Hypothesis], failed: Sequence[Hypothesis]
) -> Float[np.ndarray, "K F"]:
    """Return the probability that each candidate makes each failed check fail, the unknown last."""
    rows = [[_failure_probability(cause, effect) for effect in failed] for cause in candidates]
    unknown = [
        (UNKNOWN_OF_SYMPTOM if effect.check.is_symptom else UNKNOWN) * _unexplained(effect)
        for effect in failed
    ]
    return np.array([*rows, unknown])


def _failure_probability(cause: Hypothesis, effect: Hypothesis) -> float:
    if cause is effect:
        return DETECTED
    return EFFECT * _unexplained(effect) if cause.explains(effect) else 0.0


def _unexplained(effect: Hypothesis) -> float:
    """Return the fraction of an anomaly that its own cause leaves for others to explain."""
    return 1.0 if effect.finding is None else max(MIN_UNEXPLAINED, 1.0 - effect.finding.explained)


def _accidents(failed: Sequence[Hypothesis]) -> Float[np.ndarray, "F"]:
    """Return the probability that each check fails without any cause.

    It is higher for a single failure in many steps, and for a check that passes again.
    """
    return np.array([_accident(h) for h in failed])


def _accident(failed: Hypothesis) -> float:
    in_any_step = ACCIDENT_PER_STEP * failed.num_judged if failed.num_failed == 1 else 0.0
    likelihood = max(ACCIDENT, in_any_step, SPORADIC * (1 - failed.persistence))
    return likelihood * _unexplained(failed)


def _marginals(
    failure: Float[np.ndarray, "K F"],
    accident: Float[np.ndarray, "F"],
    priors: Float[np.ndarray, "K"],
) -> Float[np.ndarray, "K"]:
    """Return the posterior probability of each cause, summed over the sets that contain it."""
    num_causes = len(failure)
    log_spared = np.log1p(-failure)
    total, with_cause = float(np.prod(accident)), np.zeros(num_causes)  # of no cause at all
    for size in range(1, min(MAX_CAUSES, num_causes) + 1):
        sets = np.array(list(combinations(range(num_causes), size)))
        log_none = np.log1p(-accident) + log_spared[sets].sum(axis=1)
        likelihood = priors[sets].prod(axis=1) * np.prod(-np.expm1(log_none), axis=1)
        total += float(likelihood.sum())
        np.add.at(with_cause, sets, likelihood[:, None])
    return np.asarray(with_cause / total)


def _rank_key(hypothesis: Hypothesis) -> tuple[int, int, int]:
    """Sort key: earlier stage, then earlier and more frequent failures."""
    return hypothesis.check.stage, hypothesis.first_step or 0, -hypothesis.num_failed
