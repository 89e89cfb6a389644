"""Processes that should be dead."""

import time
from collections.abc import Iterable
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Whether a process is dead, also where nobody has asked how it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_until_gone(pids: Iterable[int], seconds: float = 15) -> None:
    limit = time.monotonic() + seconds
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < limit, f"still there: {left}"
        time.sleep(0.05)
