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

GRACE_SECONDS = 1.0  # seconds for processes to exit on their own


def start_cleanup_process(*, folders: Iterable[Path] = (), pids: Iterable[int] = ()) -> None:
    """Start a watchdog that deletes folders and kills processes once this process is dead."""
    if sys.platform != "linux":
        return
    arguments = json.dumps([os.getpid(), [str(path) for path in folders], sorted(pids)])
    # -I, -S: no site-packages needed, and a fast start
    script = [sys.executable, "-I", "-S", __file__, arguments]
    null_streams = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    os.posix_spawn(script[0], script, os.environ, file_actions=null_streams)


def _run_cleanup(parent: int, folders: list[str], pids: list[int]) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    alive = {handle for pid in pids for handle in _open_pidfd(pid)}
    if os.getppid() == parent:
        _wait_for_exit(set(_open_pidfd(parent)), None)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    while alive and (dead := _wait_for_exit(alive, GRACE_SECONDS)):
        alive -= dead
    for handle in alive:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _open_pidfd(pid: int) -> list[int]:
    """Return a pidfd, which unlike a pid is never reused; empty if the process is gone."""
    with suppress(ProcessLookupError):
        return [os.pidfd_open(pid)]
    return []


def _wait_for_exit(pidfds: set[int], seconds: float | None) -> set[int]:
    """Wait until at least one process has exited; return the pidfds of all that have."""
    return set(select.select(list(pidfds), [], [], seconds)[0]) if pidfds else set()


if __name__ == "__main__":
    _run_cleanup(*json.loads(sys.argv[1]))
