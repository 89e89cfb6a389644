"""What is left to do when a process has died without doing it itself: a script of its own.

It waits until whoever started it is dead. Then it deletes folders, and ends processes, that are
still there.
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

GRACE = 1.0  # seconds for processes to end by themselves


def when_this_dies(*, delete: Iterable[Path] = (), end: Iterable[int] = ()) -> None:
    """Let folders be deleted and processes be ended once this process is dead, however it dies."""
    if sys.platform != "linux":
        return
    told = json.dumps([os.getpid(), [str(path) for path in delete], sorted(end)])
    # -I, -S: it needs nothing that is installed, and starts in a blink
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
    """Return what names a process for ever, where a number is given to another one day."""
    with suppress(ProcessLookupError):
        return [os.pidfd_open(pid)]
    return []


def _first_dead(handles: set[int], seconds: float | None) -> set[int]:
    """Wait until one of some processes is dead, or several; return those that are."""
    return set(select.select(list(handles), [], [], seconds)[0]) if handles else set()


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
