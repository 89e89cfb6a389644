"""Replay a step with one change to reference, rewards, loss or update, and measure its effect."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.checks.measures import as_float64, logp_gap, rms
from klinic.evidence.metrics import kl_metrics, update_kl
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import flatten_rollouts
from klinic.learner.protocol import LossScales
from klinic.maths.advantage import ADVANTAGES
from klinic.replay.recorded import decode_rollouts, rollouts_from_record
from klinic.replay.replay import BeforeAfter, Replay


def measure_start_reference(replay: Replay) -> BeforeAfter:
    """Use the initial policy as the reference."""
    return rms(logp_gap(replay.record, "logp_old", "logp_ref")), rms(
        logp_gap(replay.scored_record(), "logp_old", "logp_ref")
    )


def measure_emitted_mask(replay: Replay) -> BeforeAfter:
    """Train exactly on the policy's tokens: the fraction of tokens with a wrong mask."""
    record = replay.record
    assert record.emitted_by is not None  # noqa: S101 - the check needs it
    by_policy = record.emitted_by == EmittedBy.POLICY
    again = flatten_rollouts(rollouts_from_record(record), step=record.step)
    return (
        float((by_policy != record.loss_mask).mean()),
        float((by_policy != again.loss_mask).mean()),
    )


def measure_kl_gradient(replay: Replay) -> BeforeAfter:
    """Compute the KL term by the formula of its estimator."""
    recorded = replay.recorded_probe("kl_gradient")
    return _gradient_error(recorded, recorded), _gradient_error(
        replay.run_probes()["kl_gradient"], recorded
    )


def _gradient_error(result: Mapping[str, Any], recorded: Mapping[str, Any]) -> float:
    """Return the distance of a gradient from the expected one, relative to the score's norm."""
    gradient_norm, expected_norm = float(result["norm"] or 0), float(result["expected_norm"] or 0)
    along = gradient_norm * expected_norm * float(result["cosine"] or 0)
    square = max(gradient_norm**2 + expected_norm**2 - 2 * along, 0.0)
    return float(np.sqrt(square)) / max(float(recorded["score_norm"] or 0), 1e-300)


def measure_micro_batches(replay: Replay) -> BeforeAfter:
    """Divide by the tokens of the full step."""
    recorded = replay.recorded_probe("micro_batches")
    return float(recorded.get("ratio") or 0.0), float(
        replay.run_probes()["micro_batches"]["ratio"] or 0.0
    )


def measure_linear_tails(replay: Replay) -> BeforeAfter:
    """Use an estimator with linear tails on the same batch."""
    learner = replay.learner
    scored = replay.score_recorded(replay.record)
    ref = torch.from_numpy(as_float64(replay.record.logp_ref)).to(scored.targets.advantage)
    scored = replace(scored, targets=replace(scored.targets, logp_ref=ref))
    norms = []
    for name in (replay.recipe.kl.estimator if replay.recipe.kl else "k3", "unbiased"):
        learner.objective = replace(learner.objective, estimator=name)
        prepared = learner.prepare(scored, LossScales(kl_coef=replay.kl_coef))
        norms.append(float(prepared.metrics["grad_norm"]))
    return norms[0], norms[1]


def measure_cleared_gradient(replay: Replay) -> BeforeAfter:
    """Start the step's backward pass from a gradient of 0: the norm of the gradient."""
    replay.learner.discard()
    scored = replay.score_recorded(replay.record)
    prepared = replay.learner.prepare(scored, LossScales(kl_coef=replay.kl_coef))
    recorded_norm = float(replay.record.facts.get("grad_norm") or 0.0)
    return recorded_norm, float(prepared.metrics["grad_norm"])


def measure_masked_select(replay: Replay) -> BeforeAfter:
    """Select unmasked tokens instead of multiplying by 0: 1 where the loss is finite."""
    recorded_loss = replay.record.facts.get("loss")
    scored = replay.score_recorded(replay.record)
    prepared = replay.learner.prepare(scored, LossScales(kl_coef=replay.kl_coef))
    return float(recorded_loss is not None and np.isfinite(float(recorded_loss))), float(
        prepared.is_finite
    )


def measure_advantages(replay: Replay) -> BeforeAfter:
    """Recompute the recipe's advantages within groups: the largest, relative to its bound."""
    record = replay.record
    assert record.reward is not None and record.advantage is not None  # noqa: S101, PT018
    again = ADVANTAGES[replay.recipe.learner.advantage](record.reward, record.group)
    return _largest_deviation(record, record.advantage), _largest_deviation(record, again)


def _largest_deviation(record: StepRecord, advantage: np.ndarray) -> float:
    """Return the largest deviation of a group's advantages from a sum of 0 or from their bound."""
    sums = np.abs(np.bincount(record.group, weights=np.nan_to_num(advantage)))
    sizes = np.bincount(record.group, weights=np.abs(np.nan_to_num(advantage)))
    bound = np.sqrt(np.maximum(np.bincount(record.group)[record.group] - 1, 1))
    over = float(np.max(np.abs(np.nan_to_num(advantage)) / bound))
    return max(float(np.max(sums / np.maximum(sizes, 1e-12))), over - 1.0, 0.0)


def measure_without_dropout(replay: Replay) -> BeforeAfter:
    """Score without dropout."""
    return float(replay.recorded_probe("rescore").get("largest") or 0.0), float(
        replay.run_probes()["rescore"]["largest"] or 0.0
    )


def measure_smaller_rate(replay: Replay) -> BeforeAfter:
    """Repeat the update before the step at a tenth of its learning rate: KL(new || old)."""
    step = replay.record.step
    update_kls = []
    for factor in (_rate_factor(replay), 0.1 * _rate_factor(replay)):
        again = replay.at_step(max(1, step - 1))
        before = again.scored_record()
        again.repeat_updates(again.record, lr_factor=factor)
        update_kls.append(update_kl(replace(before, logp=again.score_tokens(again.record))))
    return update_kls[0], update_kls[1]


def _rate_factor(replay: Replay) -> float:
    """Return the learning rate that the run used, relative to the recipe's."""
    used = replay.record.facts.get("learning_rate")
    planned = replay.recipe.learner.learning_rate
    return 1.0 if used is None else float(used) / planned


def measure_full_precision(replay: Replay) -> BeforeAfter | None:
    """Apply the update in fp32 at the recipe's learning rate: the fraction of unchanged weights."""
    recorded = replay.record.facts.get("unchanged_share")
    repeated = replay.repeat_updates(replay.record).get("unchanged_share")
    if recorded is None or repeated is None:  # measured on diagnostic steps only
        return None
    return float(recorded), repeated


def measure_regrading(replay: Replay) -> BeforeAfter | None:
    """Grade the completions again, also in reverse order: the fraction of equal rewards.

    A random grader agrees with itself no better than with the run.
    """
    if not replay.can_grade:
        return None
    rollouts = decode_rollouts(replay)
    again = replay.run.score_rollouts(rollouts).total
    reversed_again = replay.run.score_rollouts([*reversed(rollouts)]).total[::-1]
    return _fraction_equal(as_float64(replay.record.reward), again), _fraction_equal(
        reversed_again, again
    )


def _fraction_equal(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.isclose(one, other, equal_nan=True).mean())


def measure_logged_kl(replay: Replay) -> BeforeAfter | None:
    """Score the step again: the relative error of the logged KL, and of the record's.

    If the record is wrong as well, the logging is not the cause.
    """
    again = kl_metrics(replay.scored_record()).get("kl")
    if again is None:
        return None
    recorded, logged = kl_metrics(replay.record)["kl"], replay.logged_metric("kl")
    size = max(abs(again), 1e-12)
    return abs(logged - again) / size, abs(recorded - again) / size
