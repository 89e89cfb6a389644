"""Reads single key presses without echo, and restores the terminal afterwards."""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Keyboard:
    """Waits for a key press, or only for the timeout without a keyboard."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def wait(self, seconds: float) -> str:
        """Return the key pressed within the timeout; "" for none."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._handle], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._handle, 32)
        if not pressed:  # end of file: the keyboard is gone
            self._handle = None
        return pressed[:1].decode("ascii", "replace")


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Enable unbuffered key input. Ctrl-C stays a signal."""
    try:
        import termios
        import tty
    except ImportError:  # not a POSIX system
        yield Keyboard(None)
        return
    try:
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        in_front = os.tcgetpgrp(handle) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):  # stdin may be None
        in_front = False
    if not in_front:  # a background job must not change the terminal
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(handle)
        yield Keyboard(handle)
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
