"""The loop: sample, score, prepare, commit or discard, keep. Everything else is somewhere else."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Prompt, Rollout
from klinic.learner.protocol import Learner
from klinic.loop.clock import Clock
from klinic.loop.gather import Gathered, gather
from klinic.loop.kl_control import adapted, controller_metrics, held
from klinic.maths.kl_coef import KLCoefState, linear_warmup
from klinic.recipe.kl import KLSection
from klinic.rewards.scores import Scores
from klinic.sampler.protocol import Sampler


@runtime_checkable
class Parts(Protocol):
    """What the loop works with; a run assembles it, a test may pretend it."""

    learner: Learner
    sampler: Sampler
    max_steps: int
    updates_per_batch: int
    reward_warmup_steps: int
    extra_rounds: int

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


@dataclass(slots=True, kw_only=True)
class StepDone:
    """One step, after its updates."""

    step: int
    rollouts: list[Rollout]
    record: StepRecord
    """Of the first update: before it, policy and old policy are one."""
    last_record: StepRecord
    metrics: dict[str, float]
    kl_coef: float
    discarded: int
    """Updates that were not made, since loss or gradient was not a number."""
    seconds: dict[str, float] = field(default_factory=dict)


def run_loop(parts: Parts, state: LoopState, kl: KLSection | None) -> LoopState:
    """Train from `state` to the last step, or until told to stop."""
    for step in range(state.step + 1, parts.max_steps + 1):
        clock = Clock()
        with clock.over("sample"):
            weights = parts.learner.publish()
            loaded = parts.sampler.load(weights)
        gathered = gather(parts, step=step, position=state.position, clock=clock)
        with clock.over("reward"):
            record = parts.judge(gathered, step)
            facts = {"weights_published": weights.fingerprint, "weights_loaded": loaded}
            record = replace(record, facts={**record.facts, **facts})
        with clock.over("learn"):
            done = learn(
                parts,
                record,
                kl_coef=kl_coef(kl, state),
                reward_scale=reward_scale(parts, state),
                measure=due(kl, state),
            )
        done.rollouts = [gathered.rollouts[row] for row in gathered.chosen]
        done.seconds = clock.seconds
        done.metrics |= controller_metrics(kl, state.kl)
        kl_state = steered(parts, kl, state, done)
        state = LoopState(step=step, position=gathered.position, kl=kl_state)
        if not parts.keep(done, state):
            break
    return state


def learn(
    parts: Parts, record: StepRecord, *, kl_coef: float, reward_scale: float, measure: bool
) -> StepDone:
    """Make the updates of one batch."""
    scored = parts.learner.score(record, needs_reference=measure)
    records: list[StepRecord] = []
    metrics = {"reward_scale": reward_scale} if parts.reward_warmup_steps else {}
    discarded = 0
    for _ in range(parts.updates_per_batch):
        prepared = parts.learner.prepare(scored, kl_coef=kl_coef, reward_scale=reward_scale)
        records.append(prepared.record)
        metrics |= prepared.metrics
        if prepared.finite:
            metrics |= parts.learner.commit()
        else:
            parts.learner.discard()
            discarded += 1
    return StepDone(
        step=record.step,
        rollouts=[],
        record=records[0],
        last_record=records[-1],
        metrics=metrics,
        kl_coef=kl_coef,
        discarded=discarded,
    )


def kl_coef(kl: KLSection | None, state: LoopState) -> float:
    """Return the coefficient of the next step."""
    if kl is None or state.kl is None:
        return 0.0
    return linear_warmup(state.kl.coef, step=state.step, warmup_steps=kl.warmup_steps)


def reward_scale(parts: Parts, state: LoopState) -> float:
    """Return what the policy term of the next step is multiplied by; the KL term is not."""
    return linear_warmup(1.0, step=state.step, warmup_steps=parts.reward_warmup_steps)


def due(kl: KLSection | None, state: LoopState) -> bool:
    """Whether the next step needs the reference: for the loss, or because it is time to look."""
    if kl is None or state.kl is None:
        return False
    if state.kl.coef > 0 or kl.controller != "fixed":
        return True
    return kl.monitor_every > 0 and state.step % kl.monitor_every == 0


def steered(
    parts: Parts, kl: KLSection | None, state: LoopState, done: StepDone
) -> KLCoefState | None:
    """Return the controller's state after a step; say so where it can do no more."""
    measured = mean_k1(done.record)
    after = adapted(kl, state.kl, measured, done_steps=state.step)
    if measured is not None and (stay := held(kl, state.kl, after, measured)):
        parts.event(done.step, "kl coefficient held", stay.sentence, **stay.facts)
    return after
