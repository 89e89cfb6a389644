"""The memory that processes have for themselves alone, and its highest reading over a while."""

import os
import threading
from pathlib import Path

INTERVAL = 0.02  # seconds between two readings


def unique_set_size(pid: int | None = None) -> int:
    """Return the bytes of the pages that only this process has, or another one."""
    file = Path(f"/proc/{os.getpid() if pid is None else pid}/smaps_rollup")
    lines = file.read_text().splitlines()[1:]
    sizes = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    return 1024 * (sizes["Private_Clean"] + sizes["Private_Dirty"])


class PeakMeter(threading.Thread):
    """Reads the unique set size of a process until it is stopped."""

    def __init__(self, pid: int | None = None) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.first = self.peak = unique_set_size(pid)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self.peak = max(self.peak, unique_set_size(self._pid))

    def stop(self) -> int:
        """Return the highest reading."""
        self._stopped.set()
        self.join()
        return self.peak
