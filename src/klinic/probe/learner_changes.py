"""Replay a step with one change to reference, rewards, loss or update, and measure its effect."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.checks.measures import gap, rms, wide
from klinic.evidence.metrics import kl_metrics, update_kl
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import flatten
from klinic.maths.advantage import ADVANTAGES
from klinic.probe.proof import Measured
from klinic.probe.recorded import decoded, rollouts_of
from klinic.probe.replay import Replay


def start_as_reference(replay: Replay) -> Measured:
    """Use the initial policy as the reference."""
    return rms(gap(replay.record, "logp_old", "logp_ref")), rms(
        gap(replay.scored_record(), "logp_old", "logp_ref")
    )


def emitted_mask(replay: Replay) -> Measured:
    """Train exactly on the policy's tokens: the fraction of tokens with a wrong mask."""
    record = replay.record
    assert record.emitted_by is not None  # noqa: S101 - the check needs it
    own = record.emitted_by == EmittedBy.POLICY
    again = flatten(rollouts_of(record), step=record.step)
    return (
        float((own != record.loss_mask).mean()),
        float((own != again.loss_mask).mean()),
    )


def right_gradient(replay: Replay) -> Measured:
    """Compute the KL term by the formula of its estimator."""
    told = replay.told("kl_gradient")
    return _off(told, told), _off(replay.probe()["kl_gradient"], told)


def _off(answer: Mapping[str, Any], told: Mapping[str, Any]) -> float:
    """Return the distance of a gradient from the expected one, relative to the score's norm."""
    found, promised = float(answer["norm"] or 0), float(answer["expected_norm"] or 0)
    along = found * promised * float(answer["cosine"] or 0)
    square = max(found**2 + promised**2 - 2 * along, 0.0)
    return float(np.sqrt(square)) / max(float(told["score_norm"] or 0), 1e-300)


def cut_otherwise(replay: Replay) -> Measured:
    """Divide by the tokens of the full step."""
    told = replay.told("micro_batches")
    return float(told.get("ratio") or 0.0), float(replay.probe()["micro_batches"]["ratio"] or 0.0)


def linear_tails(replay: Replay) -> Measured:
    """Use an estimator with linear tails on the same batch."""
    learner = replay.learner
    scored = replay.score(replay.record)
    ref = torch.from_numpy(wide(replay.record.logp_ref)).to(scored.targets.advantage)
    scored = replace(scored, targets=replace(scored.targets, logp_ref=ref))
    norms = []
    for name in (replay.recipe.kl.estimator if replay.recipe.kl else "k3", "unbiased"):
        learner._objective = replace(learner._objective, estimator=name)
        prepared = learner.prepare(scored, kl_coef=replay.kl_coef)
        norms.append(float(prepared.metrics["grad_norm"]))
    return norms[0], norms[1]


def chosen_not_multiplied(replay: Replay) -> Measured:
    """Select unmasked tokens instead of multiplying by 0: 1 where the loss is finite."""
    told = replay.record.facts.get("loss")
    scored = replay.score(replay.record)
    prepared = replay.learner.prepare(scored, kl_coef=replay.kl_coef)
    return float(told is not None and np.isfinite(float(told))), float(prepared.finite)


def own_advantages(replay: Replay) -> Measured:
    """Recompute the recipe's advantages within groups: the largest, relative to its bound."""
    record = replay.record
    assert record.reward is not None and record.advantage is not None  # noqa: S101, PT018
    again = ADVANTAGES[replay.recipe.learner.advantage](record.reward, record.group)
    return _worst(record, record.advantage), _worst(record, again)


def _worst(record: StepRecord, advantage: np.ndarray) -> float:
    """Return the largest deviation of a group's advantages from a sum of 0 or from their bound."""
    sums = np.abs(np.bincount(record.group, weights=np.nan_to_num(advantage)))
    sizes = np.bincount(record.group, weights=np.abs(np.nan_to_num(advantage)))
    bound = np.sqrt(np.maximum(np.bincount(record.group)[record.group] - 1, 1))
    over = float(np.max(np.abs(np.nan_to_num(advantage)) / bound))
    return max(float(np.max(sums / np.maximum(sizes, 1e-12))), over - 1.0, 0.0)


def no_dropout(replay: Replay) -> Measured:
    """Score without dropout."""
    return float(replay.told("rescore").get("largest") or 0.0), float(
        replay.probe()["rescore"]["largest"] or 0.0
    )


def smaller_rate(replay: Replay) -> Measured:
    """Repeat the update before the step at a tenth of its learning rate: KL(new || old)."""
    step = replay.record.step
    moved = []
    for factor in (_rate_factor(replay), 0.1 * _rate_factor(replay)):
        again = replay.at(max(1, step - 1))
        before = again.scored_record()
        again.update(again.record, lr_factor=factor)
        moved.append(update_kl(replace(before, logp=again.score_other(again.record))))
    return moved[0], moved[1]


def _rate_factor(replay: Replay) -> float:
    """Return the learning rate that the run used, relative to the recipe's."""
    used = replay.record.facts.get("learning_rate")
    planned = replay.recipe.learner.learning_rate
    return 1.0 if used is None else float(used) / planned


def full_precision(replay: Replay) -> Measured:
    """Apply the update in fp32 at the recipe's learning rate: the fraction of unchanged weights."""
    told = replay.record.facts.get("unchanged_share")
    replay.learner._look = True
    metrics = replay.update(replay.record)
    return float(1.0 if told is None else told), float(metrics.get("unchanged_share", 0.0))


def regraded(replay: Replay) -> Measured | None:
    """Grade the completions again, also in reverse order: the fraction of equal rewards.

    A random grader agrees with itself no better than with the run.
    """
    if not replay.can_grade:
        return None
    rollouts = decoded(replay)
    again = replay.run.reward(rollouts).total
    reversed_again = replay.run.reward([*reversed(rollouts)]).total[::-1]
    return _share_equal(wide(replay.record.reward), again), _share_equal(reversed_again, again)


def _share_equal(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.isclose(one, other, equal_nan=True).mean())


def told_again(replay: Replay) -> Measured | None:
    """Score the step again: the relative error of the logged KL, and of the record's.

    If the record is wrong as well, the logging is not the cause.
    """
    again = kl_metrics(replay.scored_record()).get("kl")
    if again is None:
        return None
    recorded, told = kl_metrics(replay.record)["kl"], replay.metric("kl")
    size = max(abs(again), 1e-12)
    return abs(told - again) / size, abs(recorded - again) / size
