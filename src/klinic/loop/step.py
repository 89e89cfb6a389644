"""One training step: collect rollouts, score, prepare and commit updates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from klinic.errors import LogitsError
from klinic.evidence.metrics import mean_k1, update_kl
from klinic.evidence.record import StepRecord
from klinic.learner.protocol import Learner
from klinic.loop.clock import Clock
from klinic.loop.gather import Gathered, gather
from klinic.loop.kl_control import adapted, controller_metrics, held
from klinic.loop.parts import Parts
from klinic.loop.reference_rule import follow
from klinic.loop.state import LoopState, StepDone
from klinic.loop.watch import Watch
from klinic.maths.kl_coef import KLCoefState, linear_warmup
from klinic.model.weights import Weights
from klinic.recipe.kl import KLSection
from klinic.sampler.protocol import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors of the two terms of the loss."""

    kl_coef: float
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Rollouts with rewards, and the weights they were sampled from."""

    weights: Weights
    loaded: Loaded
    gathered: Gathered
    behind: int | None = None
    """Staleness in updates; None for synchronous sampling."""


Collect = Callable[[Parts, LoopState, Watch, Clock], Collected]


def one_step(
    parts: Parts, state: LoopState, kl: KLSection | None, collect: Collect | None = None
) -> tuple[StepDone, LoopState]:
    """Run one step without recording it; `collect` overrides how rollouts are collected."""
    step, clock = state.step + 1, Clock()
    watch = parts.watch(state)
    collected = (collect or sampled_now)(parts, state, watch, clock)
    gathered = collected.gathered
    with clock.over("reward"):
        record = parts.judge(gathered, step)
        watch.judged(gathered, record)
    with clock.over("learn"):
        scored = parts.learner.score(record, needs_reference=due(kl, state))
        far = too_far(parts.learner, scored, kl, watch)
        none_near = len(far) == record.num_rows
        if far and not none_near:
            gathered = gathered.without(far)
            record = parts.judge(gathered, step)
            scored = parts.learner.score(record, needs_reference=True)
        scales = Scales(kl_coef=kl_coef(kl, state), reward=reward_scale(parts, state))
        parts.ask(gathered, record, scales.kl_coef)
        done = learn(
            parts,
            record,
            scored,
            watch,
            scales=scales,
            only_look=none_near,
        )
    done.rollouts = [gathered.rollouts[row] for row in gathered.chosen]
    done.note(
        weights_published=collected.weights.fingerprint,
        weights_loaded=collected.loaded.fingerprint,
    )
    if collected.behind is not None:
        done.metrics["sampling/staleness"] = float(collected.behind)
    if kl is not None and kl.rollout_limit is not None:
        done.metrics["completions/kl_dropped"] = float(len(far))
    done.metrics |= controller_metrics(kl, state.kl)
    done.places = gathered.places
    done.seconds = clock.seconds
    after = LoopState(
        step=step,
        position=gathered.places[-1],
        kl=steered(parts, kl, state, done),
        history=watch.history,
        rewards=follow(parts, done, gathered.scores, state.rewards),
    )
    return done, after


def sampled_now(parts: Parts, state: LoopState, watch: Watch, clock: Clock) -> Collected:
    """Sync the newest weights to the sampler, probe the sync, and collect rollouts."""
    with clock.over("sample"):
        watch.held(parts.learner.sound())
        weights = parts.learner.publish()
        loaded = parts.sampler.load(weights)
        parts.synced(loaded.answer, state.step + 1)
    gathered = _gathered(parts, state, watch, clock)
    return Collected(weights=weights, loaded=loaded, gathered=gathered)


def _gathered(parts: Parts, state: LoopState, watch: Watch, clock: Clock) -> Gathered:
    try:
        return gather(
            parts,
            step=state.step + 1,
            position=state.position,
            clock=clock,
            places=watch.drawn,
        )
    except LogitsError:
        watch.logits()
        raise


def too_far(learner: Learner, scored: Any, kl: KLSection | None, watch: Watch) -> list[int]:
    """Return the rows whose summed KL to the reference exceeds `kl.rollout_limit`."""
    limit = None if kl is None else kl.rollout_limit
    apart = None if limit is None else learner.sequence_kl(scored)
    if limit is None or apart is None:
        return []
    far: list[int] = np.flatnonzero(apart > limit).tolist()
    if len(far) == len(apart):
        watch.all_too_far(float(np.median(apart)), limit)
    return far


def learn(
    parts: Parts,
    record: StepRecord,
    scored: Any,
    watch: Watch,
    *,
    scales: Scales,
    only_look: bool,
) -> StepDone:
    """Make the updates of one batch, up to the KL limit, or none in a dry run."""
    how = {"kl_coef": scales.kl_coef, "reward_scale": scales.reward}
    done = StepDone(step=record.step, record=record, last_record=record, kl_coef=scales.kl_coef)
    if parts.reward_warmup_steps:
        done.metrics["reward_scale"] = scales.reward
    limit = parts.update_kl_limit
    for number in range(parts.updates_per_batch):
        prepared = parts.learner.prepare(scored, **how)
        watch.prepared(prepared, record.step)
        if number and limit is not None and update_kl(prepared.record) > limit:
            done.updates_left = parts.updates_per_batch - number
            break
        done.record = done.record if number else prepared.record
        done.last_record = prepared.record
        done.metrics |= prepared.metrics
        if prepared.finite and not only_look:
            done.metrics |= parts.learner.commit(lr_factor=parts.lr_factor(record.step))
            watch.committed()
        else:
            parts.learner.discard()
            done.discarded += 1
    after = None if limit is None else parts.learner.update_kl(scored, done.record)
    watch.moved(parts.learner.sound(), after)
    if after is not None:
        done.metrics |= {"kl_new_old": after, "updates_left": float(done.updates_left)}
    return done


def kl_coef(kl: KLSection | None, state: LoopState) -> float:
    """Return the KL coefficient of the next step."""
    if kl is None or state.kl is None:
        return 0.0
    return linear_warmup(state.kl.coef, step=state.step, warmup_steps=kl.warmup_steps)


def reward_scale(parts: Parts, state: LoopState) -> float:
    """Return the factor of the policy term in the next step; the KL term has none."""
    return linear_warmup(1.0, step=state.step, warmup_steps=parts.reward_warmup_steps)


def due(kl: KLSection | None, state: LoopState) -> bool:
    """Whether the next step needs the reference: for the loss or for monitoring."""
    if kl is None or state.kl is None:
        return False
    if state.kl.coef > 0 or kl.controller != "fixed" or kl.rollout_limit is not None:
        return True
    return kl.monitor_every > 0 and state.step % kl.monitor_every == 0


def steered(
    parts: Parts, kl: KLSection | None, state: LoopState, done: StepDone
) -> KLCoefState | None:
    """Return the controller state after a step; record an event if it saturates."""
    measured = mean_k1(done.record)
    after = adapted(kl, state.kl, measured, done_steps=state.step)
    if measured is not None and (stay := held(kl, state.kl, after, measured)):
        parts.event(done.step, "kl coefficient held", stay.sentence, **stay.facts)
    return after
