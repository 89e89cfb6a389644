"""Standard output and standard error that survive write errors.

A reader may exit (`klinic train ... | head`), a terminal may close, a log's disk may fill up. The
exit code reports the command's result, so a broken pipe is ignored by every command except `klinic
watch`, whose only purpose is its output.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import IO, Any

NAMES = {1: "standard output", 2: "standard error"}
_ignored_errors = {errno.EPIPE}
"""Write errors that are ignored, together with all later output."""


def ignore_broken_pipes() -> None:
    """Ignore broken pipes on standard output and standard error."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # not a test's
            setattr(sys, name, _make_lasting(number, stream))


def ignore_write_errors() -> None:
    """Ignore every write error from now on: losing its output must not end a run."""
    _ignored_errors.update((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF))


def _make_lasting(number: int, stream: Any) -> IO[str]:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(number, "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LastingFile(io.FileIO):
    """A descriptor that is redirected to /dev/null when a write fails."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # a failure of standard error cannot be reported anywhere
            if error.errno not in _ignored_errors and self.fileno() != 2:
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
                says = f"{NAMES[number]} cannot be written ({error.strerror}): output is dropped.\n"
                os.write(2, says.encode())
