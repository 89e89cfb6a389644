"""The protocol of a run as the training loop sees it; tests implement it with fakes."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Prompt, Rollout
from klinic.learner.protocol import Learner
from klinic.loop.gather import Gathered
from klinic.loop.state import LoopState, StepDone
from klinic.loop.watch import InTroubleError, Watch
from klinic.recipe.reference import ReferenceSection
from klinic.rewards.scores import Scores
from klinic.sampler.protocol import Sampler


@runtime_checkable
class Parts(Protocol):
    """The members of a run that the training loop uses."""

    learner: Learner
    sampler: Sampler
    max_steps: int
    updates_per_batch: int
    reward_warmup_steps: int
    extra_rounds: int
    update_kl_limit: float | None
    reference_rule: ReferenceSection

    def watch(self, state: LoopState) -> Watch:
        """Return the guard of the next step."""

    def recover(self, found: InTroubleError, state: LoopState) -> LoopState:
        """Handle an anomaly; return the state to continue from, or raise to stop."""

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""

    def synced(self, answer: Mapping[str, Any], step: int) -> None:
        """Record the sampler's log-prob gap to the policy after a weight sync."""

    def next_place(self, position: int) -> int:
        """Return the index of the batch after this one; skipped batches are left out."""

    def prompts(self, position: int) -> list[Prompt]:
        """Return a batch of prompts, counted from 1."""

    def reward(self, rollouts: list[Rollout]) -> Scores:
        """Return the rewards of completions."""

    def judge(self, gathered: Gathered, step: int) -> StepRecord:
        """Return the chosen completions as a record with rewards and advantages."""

    def ask(self, gathered: Gathered, record: StepRecord, kl_coef: float) -> None:
        """Run the active probes if they are due in this step."""

    def keep(self, done: StepDone, state: LoopState) -> bool:
        """Record a step; return whether to continue."""

    def event(self, step: int, name: str, sentence: str, **facts: Any) -> None:
        """Record an event, and send its message to all trackers."""
