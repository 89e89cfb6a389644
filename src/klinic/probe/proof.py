"""Prove a cause: replay a step with one change, and compare a quantity before and after."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from klinic.probe.replay import Replay

Measured = tuple[float, float]
"""A quantity before and after."""

BETTER = 5.0  # times smaller: the remainder then has another cause


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, and the quantity to measure."""

    changed: str
    quantity: str
    measure: Callable[[Replay], Measured | None]
    """Return the quantity before and after; None where the run does not allow it."""
    holds: Callable[[float, float], bool]
    """Whether before and after prove the cause."""


def much_smaller(before: float, after: float) -> bool:
    """Whether a change removed most of a quantity."""
    return abs(after) * BETTER < abs(before)


def prove(folder: Path, cause: str, step: int, *, run_code: bool = False) -> Proof | None:
    """Replay the step with the cause's change; None where no proof is possible.

    Code that the run's recipe names (rewards, model code) runs only with `run_code`.
    """
    from klinic.probe.changes import CHANGES

    change = CHANGES.get(cause)
    if change is None:
        return None
    replay = Replay(folder, step, run_code=run_code)
    apart = replay.apart()
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
        replay_apart=apart,
    )
