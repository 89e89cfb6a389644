"""A cause proved: the step again with one thing changed, and a quantity before and after."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from klinic.probe.replay import Replay

Measured = tuple[float, float]
"""A quantity before and after."""

BETTER = 5.0  # times smaller: what remains is then not the same fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What one change does to the quantity that a cause spoilt."""

    cause: str
    changed: str
    """The one thing that was changed."""
    quantity: str
    before: float
    after: float
    confirmed: bool
    step: int
    replay_apart: float | None = None
    """How far the replay's log-probs are from those that were recorded, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to change, and what to measure."""

    changed: str
    quantity: str
    measure: Callable[[Replay], Measured | None]
    """Return the quantity before and after; None where this run does not allow it."""
    holds: Callable[[float, float], bool]
    """Whether before and after prove the cause."""


def much_smaller(before: float, after: float) -> bool:
    """Whether a change took away most of a quantity."""
    return abs(after) * BETTER < abs(before)


def prove(folder: Path, cause: str, step: int, *, run_code: bool = False) -> Proof | None:
    """Replay the step with the cause's one thing changed; None where no proof is possible.

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
