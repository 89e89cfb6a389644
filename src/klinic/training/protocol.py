"""The protocol of a run as the training loop sees it; tests implement it with fakes."""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Prompt, Rollout
from klinic.learner.protocol import Learner
from klinic.recipe.recipe import Recipe
from klinic.rewards.scores import StepRewards
from klinic.sampler.protocol import LoadResult, Sampler
from klinic.training.collect import RolloutBatch
from klinic.training.guards import StepAnomalyError, StepGuard
from klinic.training.state import CompletedStep, EventFacts, LoopState


@runtime_checkable
class TrainingRun(Protocol):
    """The members of a run that the training loop uses."""

    learner: Learner
    sampler: Sampler
    sampler_lock: AbstractContextManager[bool]
    """Held by the thread that uses the sampler."""
    recipe: Recipe

    def make_guard(self, state: LoopState) -> StepGuard:
        """Return the guard of the next step."""

    def recover(self, anomaly: StepAnomalyError, state: LoopState) -> LoopState:
        """Handle an anomaly; return the state to continue from, or raise to stop."""

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""

    def record_sync(self, loaded: LoadResult, step: int) -> None:
        """Record what arrived in a weight sync, and the sampler's log-prob gap to the policy."""

    def next_batch_index(self, batch_index: int) -> int:
        """Return the index of the batch after this one; skipped batches are left out."""

    def prompt_batch(self, batch_index: int) -> list[Prompt]:
        """Return a batch of prompts, counted from 1."""

    def score_rollouts(self, rollouts: list[Rollout]) -> StepRewards:
        """Return the rewards of completions."""

    def make_record(self, batch: RolloutBatch, step: int) -> StepRecord:
        """Return the chosen completions as a record with rewards and advantages."""

    def run_probes(self, batch: RolloutBatch, record: StepRecord, kl_coef: float) -> None:
        """Run the active probes if they are due in this step."""

    def record_step(self, completed: CompletedStep, state: LoopState) -> bool:
        """Record a step; return whether to continue."""

    def record_event(
        self, step: int, name: str, message: str, facts: EventFacts | None = None
    ) -> None:
        """Record an event, and send its message to all trackers."""
