"""Exits the process after the command, even if user code left threads running.

Python waits for every non-daemon thread; one that never ends would block a finished run.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from klinic.runtime.user_code import thread_owner

GRACE = 5.0  # seconds for threads to finish
before_exit: list[Callable[[], None]] = []
"""Callbacks for an exit through `os._exit`, which skips `atexit`."""


def exit_despite_threads(code: int) -> None:
    """Force an exit with this code after a grace period if non-daemon threads remain."""
    threads = [thread for thread in threading.enumerate() if _blocks_exit(thread)]
    if threads:
        timer = threading.Timer(GRACE, _force_exit, (code, threads))
        timer.daemon = True
        timer.start()


def _blocks_exit(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.main_thread()


def _force_exit(code: int, threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.is_alive():
            starter = thread_owner(thread)
            by = f", started by {starter}," if starter else ""
            says = f"Thread {thread.name}{by} does not end: exiting without it.\n"
            with suppress(OSError, ValueError):
                sys.stderr.write(says)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for call in before_exit:
        call()
    os._exit(code)
