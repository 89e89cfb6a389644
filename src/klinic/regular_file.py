"""Opens regular files only, and never waits: a pipe, a device or a folder is refused."""

import errno
import os
import stat
from pathlib import Path
from typing import IO

CHUNK = 1 << 20  # bytes read at a time: a long line comes in few pieces
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class NotRegularError(OSError):
    """What stands at a path is no file."""


def open_regular(path: Path) -> IO[bytes]:
    """Return a file that is open for reading; anything else is a `NotRegularError`."""
    # before it is opened, since opening a device may do something
    if stat.S_ISREG(path.stat().st_mode):
        file = os.fdopen(os.open(path, FLAGS), "rb", buffering=CHUNK)
        # again, should a pipe have taken its place
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    raise NotRegularError(errno.EINVAL, "is no file", str(path))
