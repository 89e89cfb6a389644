"""The interface between the training loop and a learner."""

from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import Float64

from klinic.evidence.measures import ClipRange
from klinic.evidence.record import ProbeResult, StepRecord
from klinic.learner.scored_batch import ScoredBatch
from klinic.model.moving_reference import MovingReferenceIdentity
from klinic.model.policy_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScales:
    """Factors of the terms of the loss."""

    kl_coef: float
    reward: float = 1.0
    """Factor of the policy term alone; below 1 while rewards warm up."""
    teacher: float = 1.0
    """Factor of the teacher term, beside its own coefficient; probes set it to 0."""


class LearnerState(TypedDict):
    """The part of a learner's checkpoint that is not tensors, as JSON values."""

    num_updates: int
    reference: NotRequired[MovingReferenceIdentity]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedUpdate:
    """A computed gradient that is not applied yet."""

    record: StepRecord
    """The batch with the learner's per-token results; a sample of it where ranks share the rows."""
    metrics: dict[str, float]
    finite_at: dict[str, bool]
    """Whether all values are finite, for logits, log-probs, loss and gradient."""
    mean_k1: float | None
    """Mean k1 to the reference over the trained tokens of the step; None if not measured."""
    update_kl: float = 0.0
    """KL(new || old) of the updates before this one; 0 if a batch has one update."""
    number: int = 0
    """Its number among the updates of the batch, by which ranks with rows of their own find it."""

    @property
    def is_finite(self) -> bool:
        """Whether the update may be applied."""
        return all(self.finite_at.values())


@runtime_checkable
class RecordSink(Protocol):
    """A writer of a run's records that runs in the background."""

    def put(self, record: StepRecord) -> None:
        """Enqueue the record of the step that was prepared last."""

    def flush(self) -> None:
        """Block until every enqueued record is written."""

    def __enter__(self) -> "RecordSink": ...

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None: ...


@runtime_checkable
class Learner(WeightSource, Protocol):
    """The policy in training. Weights change only in `commit` and `load`."""

    def score(self, record: StepRecord, *, needs_reference: bool) -> ScoredBatch:
        """Score a batch with policy and reference before its updates."""

    def prepare(self, scored: ScoredBatch, scales: LossScales) -> PreparedUpdate:
        """Compute the loss and its gradient; weights do not change."""

    def commit(self, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Apply the prepared update at the scheduled learning rate times a factor."""

    def all_finite(self) -> dict[str, bool]:
        """Whether all weights and optimizer moments are finite."""

    def update_kl(self, scored: ScoredBatch, before: StepRecord) -> float:
        """Return KL(new || old) in nats per token, after the updates of a batch.

        `before` is the record of its first update, which holds the old log-probs.
        """

    def measure(
        self, first: PreparedUpdate, last: PreparedUpdate, *, clip: ClipRange, kl_coef: float
    ) -> dict[str, float]:
        """Return the metrics of the trained tokens of the batch that was scored last.

        `first` and `last` are the first and the last of its updates that were kept.
        """

    def sequence_kl(self, scored: ScoredBatch) -> Float64[np.ndarray, "B"] | None:
        """Return k1 to the reference summed over each completion; None without a reference."""

    def probe(self, record: StepRecord, *, kl_coef: float) -> dict[str, ProbeResult]:
        """Run the active probes; return results by the names of `evidence.fields.PROBES`.

        Uses some completions of a step, before it is prepared. Weights do not change.
        """

    def discard(self) -> None:
        """Drop the prepared gradient."""

    def move_reference(
        self, step: int, *, keep: float, forget_moments: bool
    ) -> MovingReferenceIdentity | None:
        """Move the reference towards the policy after a step; return its new identity.

        `keep` is the fraction retained: 0 resets it to the policy. None without a moving reference.
        """

    def save(self, folder: Path) -> LearnerState:
        """Write weights and optimizer state; return the remaining state as JSON values."""

    def load(self, folder: Path, state: LearnerState) -> None:
        """Restore a checkpoint written by `save`."""

    def open_records(self, run: Path) -> RecordSink:
        """Return the record writer of a run."""

    def close(self) -> None:
        """Shut down the other processes of the learner, if there are any."""
