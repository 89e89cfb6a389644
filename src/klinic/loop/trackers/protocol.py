"""What a tracker is told."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout


@runtime_checkable
class Tracker(Protocol):
    """Somebody who wants to know how the run goes."""

    def begin(self, *, step: int) -> None:
        """The run goes on behind this step; whatever it was told of later steps is void."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step."""

    def completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Some completions of a step with their rewards."""

    def rewind(self, step: int) -> None:
        """The run goes back behind this step, and later ones will be told again."""

    def event(self, step: int, sentence: str) -> None:
        """Something happened that is no number."""

    def close(self) -> None:
        """Nothing more will come."""
