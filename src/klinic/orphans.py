"""No process outlives the run that it was started for, however that run ends.

Linux lets a process ask to be killed when its parent dies, and lets a parent take in whatever its
children leave behind. Elsewhere nothing here does anything.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PARENT = "KLINIC_PARENT"
"""The process that a child dies with, told by whoever starts it."""
PATIENCE = 2.0  # seconds between being asked to go and being killed
LIMIT = 10.0  # seconds: what is not gone by then waits for a disk or a driver, and cannot be killed
LOOK_EVERY = 0.02

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Let this process be killed as soon as its parent is dead, which it may be already.

    The kernel watches the thread that started this process: it must last as long as its process.
    """
    if not _prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt() -> None:
    """Become the parent of every descendant whose own parent dies; `end_descendants` ends them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """End all that descends from this process: ask first, kill what is still there, and reap it."""
    begun, asked = time.monotonic(), set[int]()
    while left := descendants(os.getpid()):
        waited = time.monotonic() - begun
        if waited > LIMIT:
            return
        for pid in left if waited > PATIENCE else left - asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if waited > PATIENCE else signal.SIGTERM)
        asked |= left
        _reap()
        time.sleep(LOOK_EVERY)


def descendants(pid: int) -> set[int]:
    """Return the processes that a process started, and those that they did."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            # behind the name, which may hold anything: state, parent
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    new = children.get(pid, [])
    while new:
        found.update(new)
        new = [child for one in new for child in children.get(one, [])]
    return found


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> bool:
    """Set something of this process; return whether it is set."""
    if sys.platform != "linux":
        return False
    import ctypes

    more = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    return bool(ctypes.CDLL(None).prctl(option, *more) == 0)
