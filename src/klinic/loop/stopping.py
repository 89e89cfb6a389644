"""Leave cleanly when asked to: SIGTERM and Ctrl-C finish the step, save, and go.

A second one does not wait. One to a whole process group is no second one when it comes twice, by
itself and from the process that supervises this one.
"""

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from klinic.evidence.run_facts import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO = 0.5  # seconds within which the same signal is the same request


def stop_event(step: int, number: int) -> dict[str, Any]:
    """Return what is written down of a run that was asked to stop."""
    says = f"Stopped by {signal.Signals(number).name} and saved. Go on with --resume."
    return {"step": step, "event": STOPPED, "signal": number, "says": says}


class Stopping:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._heard: dict[int, float] = {}
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        """True from the first signal on."""
        return self.signal is not None

    def __enter__(self) -> "Stopping":
        try:
            self._before = {number: signal.signal(number, self._on) for number in SIGNALS}
        except ValueError:  # not the main thread: whoever is there handles signals
            self._before = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._heard.get(number, -ECHO) < ECHO:
            return
        self._heard[number] = now
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
