"""warm_start.json: the progress of a warm start, which has no step yet.

It exists only during the warm start, and after one that was killed.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.numbers import as_number, as_step
from klinic.evidence.writing import write_atomically

FILE = "warm_start.json"
MIN_SECONDS = 1.0  # between two writes


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartStatus:
    """How far a warm start is."""

    step: int
    num_steps: int
    loss: float | None
    seconds: float
    """Since the first step."""

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the last step."""
        if not self.step or not math.isfinite(self.seconds):
            return None
        return self.seconds / self.step * max(0, self.num_steps - self.step)


class WarmStartFile:
    """Writes the progress of a warm start; without a run folder it writes nothing."""

    def __init__(self, run: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = None if run is None else run / FILE
        self._clock = clock
        self._begun: float | None = None
        self._written = -math.inf

    def write(self, step: int, num_steps: int, loss: float) -> None:
        """Write the progress, at most once a second."""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        if self._path is None or now - self._written < MIN_SECONDS:
            return
        self._written = now
        finite_loss = loss if math.isfinite(loss) else None
        values = {"step": step, "num_steps": num_steps, "loss": finite_loss}
        write_atomically(self._path, json_bytes({**values, "seconds": now - self._begun}))

    def remove(self) -> None:
        """Remove the file: the warm start is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def read_warm_start(run: Path) -> WarmStartStatus | None:
    """Return the progress of a warm start, or None without a valid file."""
    with suppress(EvidenceError, OSError):
        values = read_json(run / FILE)
        step, num_steps = as_step(values.get("step")), as_step(values.get("num_steps"))
        if step is not None and num_steps is not None and step <= num_steps:
            return WarmStartStatus(
                step=step,
                num_steps=num_steps,
                loss=as_number(values.get("loss")),
                seconds=as_number(values.get("seconds")) or 0.0,
            )
    return None
