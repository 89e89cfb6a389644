"""The process of a reward function, seen from here: ask it, within a time, or end it.

It is killed with all that it started: it is the head of a process group. What has left the group
(a daemon with a session of its own) is out of reach.
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

LARGEST_REPLY = 64_000_000  # bytes; a million numbers have a third of it


class Lost(Fault):
    """The process is gone, and what it was working on with it."""


class Hung(Lost):
    """It did not answer in time, and was killed."""


class Died(Lost):
    """It ended by itself."""


class Process:
    """A running worker."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: a file json.py where klinic is run must not be taken for Python's
            [sys.executable, "-P", "-m", "klinic.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        # ends it at exit as well, if nobody does before
        self.kill = weakref.finalize(self, _kill, self._process, os.getpid())
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        assert self._process.stdout is not None  # noqa: S101
        self._into, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)

    @property
    def alive(self) -> bool:
        """Whether it can be asked; one that has been killed cannot."""
        return self.kill.alive

    def ask(self, request: dict[str, Any], *, seconds: int | float) -> dict[str, Any]:
        """Return the answer to a request; the process is dead where there is none."""
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
        """Write and read as the pipes allow: one that is full must not block us past the limit."""
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
        raise ValueError("too long for an answer")
    return data


def _kill(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:  # a fork of ours ends, and not what it inherited
        return
    with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
        # before it is waited for: until then nobody else can have its number
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ending(code: int) -> str:
    """Return how a process ended.

    >>> _ending(3), _ending(-11)
    ('exit code 3', 'signal 11: Segmentation fault')
    """
    return f"exit code {code}" if code >= 0 else f"signal {-code}: {signal.strsignal(-code)}"
