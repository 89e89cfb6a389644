"""The loop: sample, score, prepare, commit or discard, keep. Everything else is somewhere else."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from klinic.doctor.trouble import History
from klinic.errors import LogitsError
from klinic.evidence.metrics import update_kl
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Prompt, Rollout
from klinic.learner.protocol import Learner
from klinic.loop.clock import Clock
from klinic.loop.gather import Gathered, gather
from klinic.loop.reference_rule import follow
from klinic.loop.watch import InTroubleError, Watch
from klinic.maths.kl_coef import KLCoefRule, KLCoefState, linear_warmup, update
from klinic.recipe.kl import KLSection
from klinic.recipe.reference import ReferenceSection
from klinic.rewards.scores import Scores
from klinic.sampler.protocol import Sampler


@runtime_checkable
class Parts(Protocol):
    """What the loop works with; a run assembles it, a test may pretend it."""

    learner: Learner
    sampler: Sampler
    max_steps: int
    updates_per_batch: int

    extra_rounds: int
    update_kl_limit: float | None
    reference_rule: ReferenceSection

    def watch(self, state: "LoopState") -> Watch:
        """Return the lookout of the next step."""

    def recover(self, found: InTroubleError, state: "LoopState") -> "LoopState":
        """Do something about trouble; return where to go on, or raise to stop."""

    def lr_factor(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied by."""

    def next_place(self, position: int) -> int:
        """Return the place of the data after this one; batches may be left out."""

    def prompts(self, position: int) -> list[Prompt]:
        """Return the batch of prompts at a place of the data, counted from 1."""

    def reward(self, rollouts: list[Rollout]) -> Scores:
        """Return what reward functions say."""

    def judge(self, gathered: Gathered, step: int) -> StepRecord:
        """Return the chosen completions as a record with rewards and advantages."""

    def keep(self, done: "StepDone", state: "LoopState") -> bool:
        """Write down a step; return whether to go on."""

    def event(self, step: int, name: str, sentence: str, **facts: Any) -> None:
        """Write down that something happened, and tell everybody in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """What the loop remembers from step to step; with the learner's weights it is everything."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Batches of prompts taken from the data; more than steps where some were sampled again."""
    kl: KLCoefState | None = None
    history: History = field(default_factory=History)
    rewards: tuple[float | None, ...] = ()
    """Mean rewards of the last steps, where the reference is reset on a plateau of them."""


@dataclass(slots=True, kw_only=True)
class StepDone:
    """One step, after its updates."""

    step: int
    record: StepRecord
    """Of the first update: before it, policy and old policy are one."""
    last_record: StepRecord
    kl_coef: float
    rollouts: list[Rollout] = field(default_factory=list)
    places: tuple[int, ...] = ()
    """Where in the data its prompts stand."""
    metrics: dict[str, float] = field(default_factory=dict)
    discarded: int = 0
    """Updates that were not made, since loss or gradient was not a number."""
    updates_left: int = 0
    """Updates that were not made, since the policy had gone far enough."""
    seconds: dict[str, float] = field(default_factory=dict)


def run_loop(parts: Parts, state: LoopState, kl: KLSection | None) -> LoopState:
    """Train from `state` to the last step, or until told to stop."""
    while state.step < parts.max_steps:
        try:
            done, after = one_step(parts, state, kl)
        except InTroubleError as found:
            parts.learner.discard()
            state = parts.recover(found, state)
            continue
        state = after
        if not parts.keep(done, state):
            break
    return state


def one_step(parts: Parts, state: LoopState, kl: KLSection | None) -> tuple[StepDone, LoopState]:
    """Make one step; nothing of it is kept yet."""
    step, clock = state.step + 1, Clock()
    watch = parts.watch(state)
    with clock.over("sample"):
        watch.held(parts.learner.sound())
        weights = parts.learner.publish()
        loaded = parts.sampler.load(weights)
    try:
        gathered = gather(parts, step=step, position=state.position, clock=clock)
    except LogitsError:
        watch.logits()
        raise
    with clock.over("reward"):
        record = parts.judge(gathered, step)
        watch.judged(gathered, record)
    with clock.over("learn"):
        scored = parts.learner.score(record, needs_reference=due(kl, state))
        if far := too_far(parts.learner, scored, kl, watch):
            gathered = gathered.without(far)
            record = parts.judge(gathered, step)
            scored = parts.learner.score(record, needs_reference=True)
        done = learn(parts, record, scored, watch, kl_coef=kl_coef(kl, state))
    done.rollouts = [gathered.rollouts[row] for row in gathered.chosen]
    facts = {"weights_published": weights.fingerprint, "weights_loaded": loaded}
    done.record = replace(done.record, facts={**done.record.facts, **facts})
    if kl is not None and kl.rollout_limit is not None:
        done.metrics["completions/kl_dropped"] = float(len(far))
    done.places = gathered.places
    done.seconds = clock.seconds
    after = LoopState(
        step=step,
        position=gathered.places[-1],
        kl=adapted(kl, state.kl, done.record),
        history=watch.history,
        rewards=follow(parts, done, gathered.scores, state.rewards),
    )
    return done, after


def too_far(learner: Learner, scored: Any, kl: KLSection | None, watch: Watch) -> list[int]:
    """Return the rows to leave out: those whose summed KL to the reference is above its limit."""
    limit = None if kl is None else kl.rollout_limit
    apart = None if limit is None else learner.sequence_kl(scored)
    if limit is None or apart is None:
        return []
    far = np.flatnonzero(apart > limit).tolist()
    if len(far) < len(apart):
        return far
    watch.all_too_far(float(np.median(apart)), limit)
    return []


def learn(
    parts: Parts, record: StepRecord, scored: Any, watch: Watch, *, kl_coef: float
) -> StepDone:
    """Make the updates of one batch, as many as its limit allows."""
    done = StepDone(step=record.step, record=record, last_record=record, kl_coef=kl_coef)
    limit = parts.update_kl_limit
    for number in range(parts.updates_per_batch):
        prepared = parts.learner.prepare(scored, kl_coef=kl_coef)
        watch.prepared(prepared, record.step)
        if number and limit is not None and update_kl(prepared.record) > limit:
            done.updates_left = parts.updates_per_batch - number
            break
        done.record = done.record if number else prepared.record
        done.last_record = prepared.record
        done.metrics |= prepared.metrics
        if prepared.finite:
            done.metrics |= parts.learner.commit(lr_factor=parts.lr_factor(record.step))
            watch.committed()
        else:
            parts.learner.discard()
            done.discarded += 1
    after = None if limit is None else parts.learner.update_kl(scored)
    watch.moved(parts.learner.sound(), after)
    if after is not None:
        done.metrics |= {"kl_new_old": after, "updates_left": float(done.updates_left)}
    return done


def kl_coef(kl: KLSection | None, state: LoopState) -> float:
    """Return the coefficient of the next step."""
    if kl is None or state.kl is None:
        return 0.0
    return linear_warmup(state.kl.coef, step=state.step, warmup_steps=kl.warmup_steps)


def due(kl: KLSection | None, state: LoopState) -> bool:
    """Whether the next step needs the reference: for the loss, or because it is time to look."""
    if kl is None or state.kl is None:
        return False
    if state.kl.coef > 0 or kl.controller != "fixed" or kl.rollout_limit is not None:
        return True
    return kl.monitor_every > 0 and state.step % kl.monitor_every == 0


def adapted(
    kl: KLSection | None, before: KLCoefState | None, record: StepRecord
) -> KLCoefState | None:
    """Return the controller's state after a step's KL."""
    if kl is None or before is None:
        return before
    measured = mean_k1(record)
    if measured is None:
        return before
    return update(KLCoefRule(rule=kl.controller, target=kl.target), before, measured)


def mean_k1(record: StepRecord) -> float | None:
    """Return what a controller steers by: the mean of k1 at `logp_old`, in nats per token."""
    from klinic.evidence.metrics import kl_metrics

    return kl_metrics(record).get("kl_k1/mean")
