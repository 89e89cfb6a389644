"""What the loop may ask of a learner, wherever it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from klinic.evidence.record import StepRecord
from klinic.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A gradient that has been computed and not yet been used."""

    record: StepRecord
    """The batch with everything the learner found out about it."""
    metrics: dict[str, float]
    finite_at: dict[str, bool]
    """Whether all values are numbers, for logits, log-probs, loss and gradient."""

    @property
    def finite(self) -> bool:
        """Whether the update may be made."""
        return all(self.finite_at.values())


@runtime_checkable
class Records(Protocol):
    """The records of a run, written beside the training."""

    def put(self, record: StepRecord) -> None:
        """Hand over the record of the step that was prepared last."""

    def flush(self) -> None:
        """Wait until every record that was put is written."""

    def __enter__(self) -> "Records": ...

    def __exit__(self, *error: Any) -> None: ...


@runtime_checkable
class Learner(Protocol):
    """The policy in training. Between `prepare` and `commit` nothing has moved."""

    def publish(self) -> Weights:
        """Say where the current weights are, and which they are."""

    def score(self, record: StepRecord, *, needs_reference: bool) -> Any:
        """Score a batch with the policy and the reference as they stand before its updates."""

    def prepare(self, scored: Any, *, kl_coef: float, reward_scale: float = 1.0) -> Prepared:
        """Compute the loss and its gradient; `reward_scale` multiplies the policy term alone."""

    def commit(self, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Make the update that was prepared, at the scheduled rate times a factor."""

    def sound(self) -> dict[str, bool]:
        """Whether all weights, and all moments of the optimiser, are numbers."""

    def update_kl(self, scored: Any, before: StepRecord) -> float:
        """Return KL(new || old) in nats per token, after the updates of a batch.

        `before` is the record of its first update, which holds the old log-probs.
        """

    def sequence_kl(self, scored: Any) -> Float64[np.ndarray, "B"] | None:
        """Return k1 to the reference summed over each completion; None without a reference."""

    def probe(self, record: StepRecord, *, kl_coef: float) -> dict[str, dict[str, Any]]:
        """Answer what records do not tell, by the names of `evidence.fields.PROBES`.

        About some completions of a step, before it is prepared. Nothing moves by it.
        """

    def discard(self) -> None:
        """Drop the gradient that was prepared."""

    def move_reference(
        self, step: int, *, keep: float, forget_moments: bool
    ) -> dict[str, Any] | None:
        """Draw the reference to the policy after a step; return which it is then.

        `keep` is the share that stays: 0 sets it to the policy. None where there is no reference.
        """

    def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimiser; return the rest of the state as plain JSON values."""

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Go back to what `save` wrote."""

    def records(self, run: Path) -> Records:
        """Return who writes down the steps of a run."""

    def close(self) -> None:
        """Let go of whatever outlives a step: other processes, if there are any."""
