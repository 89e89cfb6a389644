"""Processes of a run, each of which is a thread of the test."""

import threading
from collections.abc import Callable
from typing import Any


class ThreadProcess:
    """One of several threads that exchange bytes as the processes of a run do."""

    def __init__(self, rank: int, size: int, shared: list[bytes], barrier: threading.Barrier):
        self.rank, self.size = rank, size
        self._shared, self._barrier = shared, barrier

    def gather(self, data: bytes) -> list[bytes]:
        self._shared[self.rank] = data
        self._barrier.wait()
        gathered = list(self._shared) if self.rank == 0 else []
        self._barrier.wait()
        return gathered

    def broadcast(self, data: bytes) -> bytes:
        if self.rank == 0:
            self._shared[0] = data
        self._barrier.wait()
        data = self._shared[0]
        self._barrier.wait()
        return data


def run_in_processes(size: int, body: Callable[[ThreadProcess], Any]) -> list[Any]:
    """Run `body` once per process; return the results, or the errors, by rank."""
    shared, barrier = [b""] * size, threading.Barrier(size, timeout=20)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadProcess(rank, size, shared, barrier))
        except Exception as error:  # handed to the test
            results[rank] = error
            if isinstance(error, threading.BrokenBarrierError):
                raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
