"""Graceful stop: SIGTERM or Ctrl-C finishes the step, saves and exits.

A second signal exits at once. A signal to the process group arrives twice, directly and from the
supervisor; within `DUPLICATE_WINDOW` seconds it counts once.
"""

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from klinic.evidence.run_facts import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DUPLICATE_WINDOW = 0.5  # seconds within which a repeated signal is a duplicate


def stop_event(step: int, number: int) -> dict[str, Any]:
    """Return the event of a run stopped by a signal."""
    message = f"Stopped by {signal.Signals(number).name} and saved. Continue with --resume."
    return {"step": step, "event": STOPPED, "signal": number, "says": message}


class StopSignal:
    """Signal handler that records a stop request."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._last_received: dict[int, float] = {}
        self._previous_handlers: dict[int, object] = {}

    @property
    def is_requested(self) -> bool:
        """Whether a stop signal was received."""
        return self.signal is not None

    def __enter__(self) -> "StopSignal":
        try:
            self._previous_handlers = {
                number: signal.signal(number, self._handle_signal) for number in SIGNALS
            }
        except ValueError:  # not in the main thread, which owns the signal handlers
            self._previous_handlers = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last_received.get(number, -DUPLICATE_WINDOW) < DUPLICATE_WINDOW:
            return
        self._last_received[number] = now
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
