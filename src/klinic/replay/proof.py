"""Prove a cause: replay a step with one change, and compare a quantity before and after."""

from dataclasses import dataclass
from pathlib import Path

from klinic.replay.changes import CHANGES
from klinic.replay.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The effect of one change on the quantity that a cause affects."""

    cause: str
    changed: str
    """The one change."""
    quantity: str
    before: float
    after: float
    confirmed: bool
    step: int
    replay_apart: float | None = None
    """Difference of the replay's log-probs from the recorded ones, in nats."""


def prove_cause(folder: Path, cause: str, step: int, *, run_code: bool = False) -> Proof | None:
    """Replay the step with the cause's change; None where no proof is possible.

    Code that the run's recipe names (rewards, model code) runs only with `run_code`.
    """
    change = CHANGES.get(cause)
    if change is None:
        return None
    replay = Replay(folder, step, run_code=run_code)
    replay_difference = replay.logp_difference()
    measured = change.measure(replay)
    if measured is None:
        return None
    before, after = measured
    return Proof(
        cause=cause,
        changed=change.changed,
        quantity=change.quantity,
        before=before,
        after=after,
        confirmed=change.holds(before, after),
        step=step,
        replay_apart=replay_difference,
    )
