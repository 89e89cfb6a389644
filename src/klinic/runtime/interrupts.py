"""Ctrl-C that is not lost when a library swallows it.

A finalizer swallows a `KeyboardInterrupt`, and so does an import that catches every exception. A
command remembers the signal, and its long loops raise it again.
"""

import signal
import sys
from types import FrameType

_received = [False]


def remember_interrupts() -> None:
    """Raise `KeyboardInterrupt` on SIGINT as Python does, and remember that it came."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored by the caller
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _print_unless_interrupt


def raise_if_interrupted() -> None:
    """Raise the `KeyboardInterrupt` of a remembered signal again."""
    if _received[0]:
        raise KeyboardInterrupt


def _print_unless_interrupt(swallowed: "sys.UnraisableHookArgs") -> None:
    """Print what a finalizer raised, as Python does, but for a remembered interrupt."""
    if not issubclass(swallowed.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(swallowed)


def _interrupt(_: int, __: FrameType | None) -> None:
    _received[0] = True
    raise KeyboardInterrupt
