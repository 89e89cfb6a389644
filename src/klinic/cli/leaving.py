"""Ends the process when the command has ended, also where a function of a user left threads behind.

Python waits for every thread that is not a daemon; one that never ends would keep a finished run
from ending.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from klinic.user_code import who_started

GRACE = 5.0  # seconds for threads that are about to end
before_exit: list[Callable[[], None]] = []
"""What is called where the process does not end in Python's own way."""


def leave_without_threads(code: int) -> None:
    """End this process with an exit code in some seconds, if a thread keeps it from ending."""
    others = [thread for thread in threading.enumerate() if _waits(thread)]
    if others:
        timer = threading.Timer(GRACE, _leave, (code, others))
        timer.daemon = True
        timer.start()


def _waits(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.main_thread()


def _leave(code: int, others: list[threading.Thread]) -> None:
    for thread in others:
        if thread.is_alive():
            starter = who_started(thread)
            by = f", which {starter} has started," if starter else ""
            says = f"The thread {thread.name}{by} does not end: leaving without it.\n"
            with suppress(OSError, ValueError):
                sys.stderr.write(says)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for call in before_exit:
        call()
    os._exit(code)
