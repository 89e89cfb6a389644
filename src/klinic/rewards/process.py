"""The parent side of a reward subprocess: sends requests with a time limit, kills it.

The worker leads a process group, so its children are killed with it, except those that left the
group (a daemon with its own session).
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from typing import Any

from klinic.rewards.fault import Fault

LARGEST_REPLY = 64_000_000  # bytes; three times a million numbers


class Lost(Fault):
    """The subprocess died before it replied."""


class Hung(Lost):
    """The subprocess exceeded the time limit and was killed."""


class Died(Lost):
    """The subprocess exited by itself."""


class Process:
    """A running reward subprocess."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: a json.py in the working directory must not shadow the standard library
            [sys.executable, "-P", "-m", "klinic.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        # also kills it at interpreter exit
        self.kill = weakref.finalize(self, _kill, self._process, os.getpid())
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe
        assert self._process.stdout is not None  # noqa: S101
        self._into, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)

    @property
    def alive(self) -> bool:
        """Whether it accepts requests: it has not been killed."""
        return self.kill.alive

    def ask(self, request: dict[str, Any], *, seconds: int | float) -> dict[str, Any]:
        """Return the reply; without one, kill the process and raise `SubprocessLostError`."""
        data = json.dumps(request).encode() + b"\n"
        try:
            line = self._exchange(data, time.monotonic() + seconds)
            answer: dict[str, Any] = json.loads(line)
        except TimeoutError:
            self.kill()
            raise Hung(f"did not return within {seconds:g} s") from None
        except (EOFError, OSError, ValueError):
            self.kill()
            raise Died(f"ended its process ({_ending(self._process.returncode)})") from None
        return answer

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        """Write and read without blocking, so that a full pipe cannot exceed the deadline."""
        left, reply = memoryview(request), bytearray()
        with selectors.DefaultSelector() as pipes:
            pipes.register(self._into, selectors.EVENT_WRITE)
            pipes.register(self._from, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                ready = {key.fd for key, _ in pipes.select(max(0.0, deadline - time.monotonic()))}
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if self._from in ready:
                    reply += _read(self._from, len(reply))
                if self._into in ready:
                    left = left[os.write(self._into, left) :]
                    if not left:
                        pipes.unregister(self._into)
        return bytes(reply)


def _read(file: int, already: int) -> bytes:
    data = os.read(file, 1 << 16)
    if not data:
        raise EOFError
    if already > LARGEST_REPLY:
        raise ValueError("the reply is too long")
    return data


def _kill(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:  # a forked child exits: it must not kill its parent's worker
        return
    with suppress(ProcessLookupError, PermissionError):  # already gone
        # before `wait`: until then its pid cannot be reused
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ending(code: int) -> str:
    """Describe an exit code.

    >>> _ending(3), _ending(-11)
    ('exit code 3', 'signal 11: Segmentation fault')
    """
    return f"exit code {code}" if code >= 0 else f"signal {-code}: {signal.strsignal(-code)}"
