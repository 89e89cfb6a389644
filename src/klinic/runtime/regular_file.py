"""Opens regular files only, without blocking: pipes, devices and folders are refused."""

import errno
import os
import stat
from pathlib import Path
from typing import IO

BUFFER_BYTES = 1 << 20  # bytes per read: long lines take few reads
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class NotRegularError(OSError):
    """A path is not a regular file."""


def open_regular(path: Path) -> IO[bytes]:
    """Return a file opened for reading; raise `NotRegularError` for any other type."""
    # checked before opening, since opening a device can have side effects
    if stat.S_ISREG(path.stat().st_mode):
        file = os.fdopen(os.open(path, OPEN_FLAGS), "rb", buffering=BUFFER_BYTES)
        # checked again, in case a pipe has replaced the file
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    raise NotRegularError(errno.EINVAL, "is not a regular file", str(path))
