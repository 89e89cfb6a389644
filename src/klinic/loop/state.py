"""What the loop remembers from step to step, and what one step leaves."""

from dataclasses import dataclass, field, replace

from klinic.doctor.trouble import History
from klinic.evidence.record import Fact, StepRecord
from klinic.evidence.rollout import Rollout
from klinic.maths.kl_coef import KLCoefState


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

    def note(self, **facts: Fact) -> None:
        """Add facts to its record."""
        self.record = replace(self.record, facts={**self.record.facts, **facts})
