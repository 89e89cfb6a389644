"""The protocol of a tracker."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout


@runtime_checkable
class Tracker(Protocol):
    """A metrics sink: console, TensorBoard, W&B or trackio."""

    def begin(self, *, step: int) -> None:
        """Start after `step`; data of later steps is void."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Log some completions of a step with their rewards."""

    def rewind(self, step: int) -> None:
        """Roll back to `step`; later steps will be logged again."""

    def log_message(self, step: int, message: str) -> None:
        """Log a message."""

    def close(self) -> None:
        """Close; no further calls follow."""
