"""Worker processes that judge segments of a long run.

Segments and results travel over a pipe. If a worker dies, hangs or fails, the parent process judges
its segments itself, so the result never depends on a worker. Workers exit with their parent,
however it ends.
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
from klinic.doctor.segments import Segment, judge_segment, to_json_values
from klinic.runtime.process_tree import die_with_parent

MAX_QUEUED_SEGMENTS = 2  # segments queued per worker, so that it never waits for the next one


class JudgeWorker:
    """One worker process and its queued segments."""

    def __init__(self) -> None:
        # spawned: a forked child would inherit locks held by other threads
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_judge_from_pipe, args=(other, os.getpid()), daemon=True
        )
        self._process.start()
        other.close()
        # a thread, because a pipe to a stopped process fills up and blocks
        self._tasks: SimpleQueue[Segment] = SimpleQueue()
        Thread(target=self._send_segments, daemon=True, name="klinic-segments").start()
        self.pending: list[int] = []
        """Numbers of the segments without a result yet, in order."""

    def queue_segment(self, number: int, segment: Segment) -> None:
        """Queue a segment without blocking."""
        self._tasks.put(segment)
        self.pending.append(number)

    def _send_segments(self) -> None:
        with suppress(OSError, ValueError, TypeError):  # the process exited and the pipe is closed
            while True:
                self._pipe.send(self._tasks.get())

    def take_result(self, patience: float) -> tuple[int, Any] | None:
        """Return a segment's number and result; None if none arrived within `patience` seconds."""
        try:
            if not self.pending or not self._pipe.poll(patience):
                return None
            answer = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return self.pending.pop(0), answer

    @property
    def is_alive(self) -> bool:
        """Whether the process exists, running or stopped."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill the process; its segments must be judged elsewhere."""
        self.pending.clear()
        with suppress(OSError, ValueError):
            self._process.kill()
            self._process.join(timeout=1.0)
            self._pipe.close()


@contextmanager
def start_workers(num: int) -> Iterator[list[JudgeWorker]]:
    """Start up to `num` workers, fewer if the system refuses, and kill them at exit."""
    workers: list[JudgeWorker] = []
    with suppress(OSError, ImportError, RuntimeError):
        workers.extend(JudgeWorker() for _ in range(num))
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def usable_cores() -> int:
    """Return the number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _judge_from_pipe(pipe: Connection, parent: int) -> None:
    """Judge segments from the pipe until it closes, also when the parent dies."""
    die_with_parent(parent)
    np.seterr(all="ignore")  # as in the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills this process
    with suppress(EOFError, OSError):
        while True:
            segment = pipe.recv()
            try:
                answer = to_json_values(judge_segment(segment, CHECKS))
            except Exception:  # the parent judges it again and raises the error
                answer = None
            pipe.send(answer)
