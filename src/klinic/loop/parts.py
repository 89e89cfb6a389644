"""What the loop works with; a run assembles it, a test may pretend it."""

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
    """What the loop works with; a run assembles it, a test may pretend it."""

    learner: Learner
    sampler: Sampler
    max_steps: int
    updates_per_batch: int
    reward_warmup_steps: int
    extra_rounds: int
    update_kl_limit: float | None
    reference_rule: ReferenceSection

    def watch(self, state: LoopState) -> Watch:
        """Return the lookout of the next step."""

    def recover(self, found: InTroubleError, state: LoopState) -> LoopState:
        """Do something about trouble; return where to go on, or raise to stop."""

    def lr_factor(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied by."""

    def synced(self, answer: Mapping[str, Any], step: int) -> None:
        """Hear how far the sampler is from the policy after it has taken over its weights."""

    def next_place(self, position: int) -> int:
        """Return the place of the data after this one; batches may be left out."""

    def prompts(self, position: int) -> list[Prompt]:
        """Return the batch of prompts at a place of the data, counted from 1."""

    def reward(self, rollouts: list[Rollout]) -> Scores:
        """Return what reward functions say."""

    def judge(self, gathered: Gathered, step: int) -> StepRecord:
        """Return the chosen completions as a record with rewards and advantages."""

    def ask(self, gathered: Gathered, record: StepRecord, kl_coef: float) -> None:
        """Ask the live parts, if it is time, what the record of a step does not tell."""

    def keep(self, done: StepDone, state: LoopState) -> bool:
        """Write down a step; return whether to go on."""

    def event(self, step: int, name: str, sentence: str, **facts: Any) -> None:
        """Write down that something happened, and tell everybody in a sentence."""
