"""The state of the loop between steps, the result of one step, and its seconds by phase."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from klinic.doctor.anomalies import History
from klinic.evidence.record import Fact, StepRecord
from klinic.evidence.rollout import Rollout
from klinic.learner.protocol import PreparedUpdate
from klinic.maths.kl_coef import KLCoefState

EventFacts = Mapping[str, Fact]
"""Facts of an event, in addition to its step, name and message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The state of the loop between steps; with the learner's state it is complete."""

    step: int = 0
    """Completed steps."""
    batch_index: int = 0
    """Batches of prompts taken from the data; more than steps where batches were resampled."""
    kl: KLCoefState | None = None
    history: History = field(default_factory=History)
    rewards: tuple[float | None, ...] = ()
    """Mean rewards of the last steps, if the reference is reset on a plateau."""


@dataclass(slots=True, kw_only=True)
class CompletedStep:
    """The result of one step."""

    step: int
    record: StepRecord
    """Of the first update, before which policy and old policy are equal; a sample of its rows if
    several processes have them."""
    all_rows: StepRecord
    """Every row of the step, without the results of the learner."""
    kl_coef: float
    mean_k1: float | None = None
    """Mean k1 to the reference over the trained tokens; None if not measured."""
    rollouts: list[Rollout] = field(default_factory=list)
    batch_indices: tuple[int, ...] = ()
    """Indices of the batches that its prompts come from."""
    metrics: dict[str, float] = field(default_factory=dict)
    updates: list[PreparedUpdate] = field(default_factory=list)
    """The first and the last update of the batch."""
    token_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the trained tokens of all rows."""
    num_discarded: int = 0
    """Updates discarded because loss or gradient was not finite, or no term was left."""
    num_skipped_updates: int = 0
    """Updates skipped because the policy reached its KL limit."""
    seconds: dict[str, float] = field(default_factory=dict)

    def add_facts(self, **facts: Fact) -> None:
        """Add facts to the record."""
        self.record = replace(self.record, facts={**self.record.facts, **facts})


class PhaseTimer:
    """Accumulates the seconds of code blocks by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        """Add the duration of a block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
