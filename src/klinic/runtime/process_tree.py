"""Child processes die with the run that started them, however that run ends.

On Linux, a process can request a signal at its parent's death (PDEATHSIG), and a parent can adopt
orphaned descendants (subreaper). On other platforms these functions do nothing.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PARENT_PID_VARIABLE = "KLINIC_PARENT"
"""Environment variable with the pid of the process that a child dies with; set by its parent."""
TERM_GRACE_SECONDS = 2.0  # seconds between SIGTERM and SIGKILL
KILL_TIMEOUT_SECONDS = 10.0  # seconds: a process alive by then is in uninterruptible sleep
POLL_SECONDS = 0.02

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if the parent is dead already.

    The kernel watches the thread that started this process: it must live as long as its process.
    """
    if not _set_prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Become the subreaper of all descendants, so that `kill_descendants` reaches orphans too."""
    _set_prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Terminate all descendants: SIGTERM, then SIGKILL after a grace period, and reap them."""
    start, signalled = time.monotonic(), set[int]()
    while alive := descendant_pids(os.getpid()):
        elapsed = time.monotonic() - start
        if elapsed > KILL_TIMEOUT_SECONDS:
            return
        for pid in alive if elapsed > TERM_GRACE_SECONDS else alive - signalled:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if elapsed > TERM_GRACE_SECONDS else signal.SIGTERM)
        signalled |= alive
        _reap_children()
        time.sleep(POLL_SECONDS)


def descendant_pids(pid: int) -> set[int]:
    """Return the pids of all direct and indirect child processes."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has exited
            # after the command name in parentheses: state, parent pid
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    pids: set[int] = set()
    generation = children.get(pid, [])
    while generation:
        pids.update(generation)
        generation = [child for ancestor in generation for child in children.get(ancestor, [])]
    return pids


def _reap_children() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _set_prctl(option: int, value: int) -> bool:
    """Set a process attribute; return whether it succeeded."""
    if sys.platform != "linux":
        return False
    import ctypes

    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    return bool(ctypes.CDLL(None).prctl(option, *arguments) == 0)
