"""Keys of a terminal, one at a time and without an echo; the terminal is put back as it was."""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Keyboard:
    """Waits for a key, or just waits where there is no keyboard."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def wait(self, seconds: float) -> str:
        """Return the key that was pressed meanwhile; "" for none."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._handle], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._handle, 32)
        if not pressed:  # the keyboard is gone: nothing will ever come from it
            self._handle = None
        return pressed[:1].decode("ascii", "replace")


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Take keys as they are pressed. Ctrl-C stays a signal."""
    try:
        import termios
        import tty
    except ImportError:  # a system without them
        yield Keyboard(None)
        return
    try:
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        in_front = os.tcgetpgrp(handle) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):  # stdin may be None
        in_front = False
    if not in_front:  # a job behind others must not touch the terminal
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(handle)
        yield Keyboard(handle)
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
