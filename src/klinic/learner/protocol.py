"""What the loop may ask of a learner, wherever it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from klinic.evidence.record import StepRecord
from klinic.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A gradient that has been computed and not yet been used."""

    record: StepRecord
    """The batch with everything the learner found out about it."""
    metrics: dict[str, float]
    finite: bool
    """Whether loss and gradient are numbers."""


@runtime_checkable
class Learner(Protocol):
    """The policy in training. Between `prepare` and `commit` nothing has moved."""

    def publish(self) -> Weights:
        """Say where the current weights are, and which they are."""

    def score(self, record: StepRecord, *, needs_reference: bool) -> Any:
        """Score a batch with the policy and the reference as they stand before its updates."""

    def prepare(self, scored: Any, *, kl_coef: float, reward_scale: float = 1.0) -> Prepared:
        """Compute the loss and its gradient; `reward_scale` multiplies the policy term alone."""

    def commit(self) -> dict[str, float]:
        """Make the update that was prepared."""

    def discard(self) -> None:
        """Drop the gradient that was prepared."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimiser; return the rest of the state as plain JSON values."""

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Go back to what `save` wrote."""
