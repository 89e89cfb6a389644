"""Standard output and standard error that a command outlives.

A reader may leave (`klinic train ... | head`), a terminal may be closed, the disk of a log may be
full. The exit code tells what the command found, not who read it: a pipe without a reader is
ignored by every command but `klinic watch`, which has nothing else to do than to be read.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import IO, Any

NAMES = {1: "standard output", 2: "standard error"}
_outlived = {errno.EPIPE}
"""Errors of writing that are ignored, with everything that is written afterwards."""


def outlive_readers() -> None:
    """Ignore a pipe that nobody reads any more."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # else it is a test's
            setattr(sys, name, _lasting(number, stream))


def outlive_output() -> None:
    """Ignore every error of writing from here on: a run does not end for want of a reader."""
    _outlived.update((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF))


def _lasting(number: int, stream: Any) -> IO[str]:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(number, "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LastingFile(io.FileIO):
    """A descriptor that becomes /dev/null when writing to it fails."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # what cannot be written to standard error can be said nowhere
            if error.errno not in _outlived and self.fileno() != 2:
                raise
            self._give_up(error)
            return len(data)

    def _give_up(self, error: OSError) -> None:
        number = self.fileno()
        with suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.close(nothing)
        if error.errno != errno.EPIPE and number == 1:
            with suppress(OSError):
                says = f"{NAMES[number]} cannot be written ({error.strerror}): going on without.\n"
                os.write(2, says.encode())
