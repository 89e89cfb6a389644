"""One training step: collect rollouts, score, prepare and commit updates."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from klinic.errors import LogitsError
from klinic.evidence.measures import ClipRange
from klinic.evidence.record import StepRecord
from klinic.learner.protocol import Learner, LossScales
from klinic.learner.scored_batch import ScoredBatch
from klinic.maths.kl_coef import KLCoefState, linear_warmup
from klinic.model.weights import Weights
from klinic.recipe.sections import KLSection
from klinic.sampler.protocol import LoadResult, release_sampler_memory
from klinic.training.collect import RolloutBatch, collect_rollouts
from klinic.training.guards import StepGuard
from klinic.training.kl_control import controller_metrics, saturation_notice, update_kl_coef
from klinic.training.protocol import TrainingRun
from klinic.training.reference_updates import last_reset, update_reference
from klinic.training.state import CompletedStep, LoopState, PhaseTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedRollouts:
    """Rollouts with rewards, and the weights they were sampled from."""

    weights: Weights
    loaded: LoadResult
    batch: RolloutBatch
    staleness: int | None = None
    """Staleness in updates; None for synchronous sampling."""


CollectRollouts = Callable[[TrainingRun, LoopState, StepGuard, PhaseTimer], CollectedRollouts]


def run_step(
    run: TrainingRun, state: LoopState, collect: CollectRollouts | None = None
) -> tuple[CompletedStep, LoopState]:
    """Run one step without recording it; `collect` overrides how rollouts are collected."""
    kl, step, timer = run.recipe.kl, state.step + 1, PhaseTimer()
    guard = run.make_guard(state)
    collected = (collect or collect_from_newest)(run, state, guard, timer)
    batch = collected.batch
    with timer.time_phase("reward"):
        record = run.make_record(batch, step)
        guard.check_rewards(batch, record)
    with timer.time_phase("learn"):
        scored = run.learner.score(record, needs_reference=needs_reference(kl, state))
        over_limit = rows_over_kl_limit(run.learner, scored, kl, guard)
        all_over_limit = len(over_limit) == record.num_rows
        if over_limit:
            batch = replace(batch, kl_only=tuple(over_limit))
            record = run.make_record(batch, step)
            scored = run.learner.score(record, needs_reference=True)
        scales = LossScales(kl_coef=kl_coef(kl, state), reward=reward_scale(run, state))
        run.run_probes(batch, record, scales.kl_coef)
        completed = update_policy(
            run,
            record,
            scored,
            guard,
            scales=scales,
            dry_run=all_over_limit and not scales.kl_coef,  # no term is left
        )
    completed.token_metrics = measure_updates(run, completed)
    completed.rollouts = [batch.rollouts[row] for row in batch.chosen]
    completed.add_facts(
        weights_published=collected.weights.fingerprint,
        weights_loaded=collected.loaded.fingerprint,
    )
    if collected.staleness is not None:
        completed.metrics["sampling/staleness"] = float(collected.staleness)
    if kl is not None and kl.rollout_limit is not None:
        completed.metrics["completions/kl_dropped"] = float(len(over_limit))
    completed.metrics |= controller_metrics(kl, state.kl)
    completed.batch_indices = batch.batch_indices
    completed.seconds = timer.seconds
    next_state = LoopState(
        step=step,
        batch_index=batch.batch_indices[-1],
        kl=update_controller(run, state, completed),
        history=guard.history,
        rewards=update_reference(run, completed, batch.scores, state.rewards),
    )
    return completed, next_state


def collect_from_newest(
    run: TrainingRun, state: LoopState, guard: StepGuard, timer: PhaseTimer
) -> CollectedRollouts:
    """Sync the newest weights to the sampler, probe the sync, and collect rollouts."""
    with timer.time_phase("sample"):
        guard.check_state(run.learner.all_finite())
        weights = run.learner.publish()
        loaded = run.sampler.load(weights)
        run.record_sync(loaded, state.step + 1)
    try:
        batch = _collect_guarded(run, state, guard, timer)
    finally:
        with timer.time_phase("sample"):
            release_sampler_memory(run.sampler)
    return CollectedRollouts(weights=weights, loaded=loaded, batch=batch)


def _collect_guarded(
    run: TrainingRun, state: LoopState, guard: StepGuard, timer: PhaseTimer
) -> RolloutBatch:
    try:
        return collect_rollouts(
            run,
            step=state.step + 1,
            batch_index=state.batch_index,
            timer=timer,
            batch_indices=guard.taken_batches,
        )
    except LogitsError:
        guard.report_logits()
        raise


def rows_over_kl_limit(
    learner: Learner, scored: ScoredBatch, kl: KLSection | None, guard: StepGuard
) -> list[int]:
    """Return the rows whose summed KL to the reference exceeds `kl.rollout_limit`."""
    limit = None if kl is None else kl.rollout_limit
    sequence_kl = None if limit is None else learner.sequence_kl(scored)
    if limit is None or sequence_kl is None:
        return []
    over_limit: list[int] = np.flatnonzero(sequence_kl > limit).tolist()
    if len(over_limit) == len(sequence_kl):
        guard.report_all_over_limit(float(np.median(sequence_kl)), limit)
    return over_limit


def update_policy(
    run: TrainingRun,
    record: StepRecord,
    scored: ScoredBatch,
    guard: StepGuard,
    *,
    scales: LossScales,
    dry_run: bool,
) -> CompletedStep:
    """Make the updates of one batch, up to the KL limit, or none in a dry run."""
    num_updates = run.recipe.learner.updates_per_batch
    completed = CompletedStep(
        step=record.step, record=record, all_rows=record, kl_coef=scales.kl_coef
    )
    if run.recipe.learner.reward_warmup_steps:
        completed.metrics["reward_scale"] = scales.reward
    limit = guard.update_kl_limit
    for number in range(num_updates):
        prepared = run.learner.prepare(scored, scales)
        guard.check_gradient(prepared, record.step)
        if number and limit is not None and prepared.update_kl > limit:
            completed.num_skipped_updates = num_updates - number
            break
        if not number:
            completed.record, completed.mean_k1 = prepared.record, prepared.mean_k1
        completed.updates = [*completed.updates[:1], prepared]
        completed.metrics |= prepared.metrics
        if prepared.is_finite and not dry_run:
            completed.metrics |= run.learner.commit(lr_factor=run.lr_factor(record.step))
            guard.count_update()
        else:
            run.learner.discard()
            completed.num_discarded += 1
    final_update_kl = None if limit is None else run.learner.update_kl(scored, completed.record)
    guard.check_update(run.learner.all_finite(), final_update_kl)
    if final_update_kl is not None:
        completed.metrics |= {
            "kl_new_old": final_update_kl,
            "updates_left": float(completed.num_skipped_updates),
        }
    return completed


def measure_updates(run: TrainingRun, completed: CompletedStep) -> dict[str, float]:
    """Return the metrics of the trained tokens of a step."""
    learner, updates = run.recipe.learner, completed.updates
    clip = ClipRange(
        low=learner.clip_low, high=learner.clip_high, by_sequence=learner.loss == "gspo"
    )
    return run.learner.measure(updates[0], updates[-1], clip=clip, kl_coef=completed.kl_coef)


def kl_coef(kl: KLSection | None, state: LoopState) -> float:
    """Return the KL coefficient of the next step."""
    if kl is None or state.kl is None:
        return 0.0
    return linear_warmup(state.kl.coef, step=state.step, warmup_steps=kl.warmup_steps)


def reward_scale(run: TrainingRun, state: LoopState) -> float:
    """Return the factor of the policy term in the next step; the KL term has none."""
    return linear_warmup(1.0, step=state.step, warmup_steps=run.recipe.learner.reward_warmup_steps)


def needs_reference(kl: KLSection | None, state: LoopState) -> bool:
    """Whether the next step needs the reference: for the loss or for monitoring."""
    if kl is None or state.kl is None:
        return False
    if state.kl.coef > 0 or kl.controller != "fixed" or kl.rollout_limit is not None:
        return True
    return kl.monitor_every > 0 and state.step % kl.monitor_every == 0


def update_controller(
    run: TrainingRun, state: LoopState, completed: CompletedStep
) -> KLCoefState | None:
    """Return the controller state after a step; record an event if it saturates."""
    kl, measured_kl = run.recipe.kl, completed.mean_k1
    next_state = update_kl_coef(
        kl,
        state.kl,
        measured_kl,
        done_steps=state.step,
        reference_step=last_reset(run.recipe.reference, completed.record),
    )
    if measured_kl is not None and (
        notice := saturation_notice(kl, state.kl, next_state, measured_kl)
    ):
        run.record_event(completed.step, "kl coefficient held", notice.message, notice.facts)
    return next_state
