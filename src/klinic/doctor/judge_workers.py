"""Further processes that judge segments of a long run.

They get what they judge over a pipe and answer over it. One that dies, is stopped or fails has
judged nothing: its segment is judged by the process that started it, which so never depends on it.
Workers end with that process, however it ends.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from klinic.checks import CHECKS
from klinic.doctor.segments import Segment, judge, to_plain
from klinic.orphans import die_with

AHEAD = 2  # segments that a worker has at most: the next one is there when it is done with one


class JudgeWorker:
    """One process, and the segments that it has."""

    def __init__(self) -> None:
        # spawned: a forked child would share threads and locks with whatever runs here
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, os.getpid()), daemon=True)
        self._process.start()
        other.close()
        # a thread, because a pipe to a process that is stopped fills up and blocks
        self._tasks: SimpleQueue[Segment] = SimpleQueue()
        Thread(target=self._send, daemon=True, name="klinic-segments").start()
        self.has: list[int] = []
        """Numbers of the segments that it was given and has not answered."""

    def give(self, number: int, segment: Segment) -> None:
        """Hand over a segment; returns at once."""
        self._tasks.put(segment)
        self.has.append(number)

    def _send(self) -> None:
        with suppress(OSError, ValueError, TypeError):  # the process is gone, and the pipe closed
            while True:
                self._pipe.send(self._tasks.get())

    def take(self, patience: float) -> tuple[int, Any] | None:
        """Return a segment's number and examination; None where none came in so many seconds."""
        try:
            if not self.has or not self._pipe.poll(patience):
                return None
            answer = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return self.has.pop(0), answer

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is stopped."""
        return self._process.is_alive()

    def end(self) -> None:
        """Kill the process; what it had is to be judged elsewhere."""
        self.has.clear()
        with suppress(OSError, ValueError):
            self._process.kill()
            self._process.join(timeout=1.0)
            self._pipe.close()


@contextmanager
def start_workers(num: int) -> Iterator[list[JudgeWorker]]:
    """Start processes and end them; where the system allows none, there are fewer."""
    workers: list[JudgeWorker] = []
    with suppress(OSError, ImportError, RuntimeError):
        workers.extend(JudgeWorker() for _ in range(num))
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _serve(pipe: Connection, parent: int) -> None:
    """Judge what comes over the pipe until it closes, as it does when its other end dies."""
    die_with(parent)
    np.seterr(all="ignore")  # as in the process that started this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    with suppress(EOFError, OSError):
        while True:
            segment = pipe.recv()
            try:
                answer = to_plain(judge(segment, CHECKS))
            except Exception:  # judged again where it can be told
                answer = None
            pipe.send(answer)
