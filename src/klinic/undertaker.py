"""Watchdog process that removes temporary folders and kills children once its parent has died.

Runs as a script of its own, without installed packages. It waits for the death of the process that
started it, then deletes the folders and ends the processes that still exist.
"""

import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

GRACE = 1.0  # seconds for processes to exit on their own


def when_this_dies(*, delete: Iterable[Path] = (), end: Iterable[int] = ()) -> None:
    """Start a watchdog that deletes folders and kills processes once this process is dead."""
    if sys.platform != "linux":
        return
    told = json.dumps([os.getpid(), [str(path) for path in delete], sorted(end)])
    # -I, -S: no site-packages needed, and a fast start
    script = [sys.executable, "-I", "-S", __file__, told]
    nothing = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    os.posix_spawn(script[0], script, os.environ, file_actions=nothing)


def _main(parent: int, folders: list[str], processes: list[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left = {handle for pid in processes for handle in _handles(pid)}
    if os.getppid() == parent:
        _first_dead(set(_handles(parent)), None)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    while left and (dead := _first_dead(left, GRACE)):
        left -= dead
    for handle in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _handles(pid: int) -> list[int]:
    """Return a pidfd, which unlike a pid is never reused; empty if the process is gone."""
    with suppress(ProcessLookupError):
        return [os.pidfd_open(pid)]
    return []


def _first_dead(handles: set[int], seconds: float | None) -> set[int]:
    """Wait until at least one process has exited; return the pidfds of all that have."""
    return set(select.select(list(handles), [], [], seconds)[0]) if handles else set()


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
