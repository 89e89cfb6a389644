"""What is added to a step, timed inside the step itself.

A ratio of two arms is no finer than its control, and a part of a hundredth drowns in it. So added
work is also timed where it is done: the seconds of the functions that do it and, in full, the CPU
of the threads that they hand work to, over the rest of the same step. What slows the machine slows
both.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from bench.harness import interval

STEPS = 40


class Inside:
    """A clock that runs while added work is done, and stands while it calls what was there.

    With `has_processor_time` it counts the processor's time of the thread that makes the steps, so
    that other programs and waits for other ranks do not count.
    """

    def __init__(self, *, has_processor_time: bool = False) -> None:
        self.seconds = 0.0
        self.has_processor_time = has_processor_time
        self._stack: list[bool] = []
        self._since = 0.0

    @contextmanager
    def _within(self, *, added: bool) -> Any:
        self._count()
        self._stack.append(added)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def _count(self) -> None:
        now = time.thread_time() if self.has_processor_time else time.perf_counter()
        if self._stack and self._stack[-1]:
            self.seconds += now - self._since
        self._since = now

    @contextmanager
    def adding(self, *methods: tuple[Any, str]) -> Iterator[None]:
        """Let the time of some methods count, each told as its owner and its name."""
        with ExitStack() as patched:
            for owner, name in methods:
                change = self.added(getattr(owner, name))
                patched.enter_context(patch.object(owner, name, change))
            yield

    def added(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time counts."""
        return self._wrapped(function, added=True)

    def there_before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time does not count, wherever it is called from."""
        return self._wrapped(function, added=False)

    def _wrapped(self, function: Callable[..., Any], *, added: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._within(added=added):
                return function(*args, **kwargs)

        return wrapped


def share(
    step: Callable[[], Any],
    clock: Inside,
    thread: threading.Thread,
    *,
    must: float | None,
    rounds: int = STEPS,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the time of a step with what is added over that without, and the seconds of each.

    What need not keep a bound is told without one.
    """
    raw: dict[str, list[float]] = {"step": [], "added": [], "added_by_threads": []}
    assert thread.ident is not None  # noqa: S101 - it makes the steps
    own = time.pthread_getcpuclockid(thread.ident)
    for _ in range(rounds):
        began = time.perf_counter(), time.process_time(), time.clock_gettime(own), clock.seconds
        step()
        added = clock.seconds - began[3]
        wall, by_step = time.perf_counter() - began[0], time.clock_gettime(own) - began[2]
        cpu = time.process_time() - began[1] - by_step
        raw["step"].append(by_step if clock.has_processor_time else wall)
        raw["added"].append(added)
        raw["added_by_threads"].append(cpu)
    found = interval([1 + (a + c) / (s - a) for s, a, c in zip(*raw.values(), strict=True)])
    told = {
        "median": found.median,
        "low": found.low,
        "high": found.high,
        "must": must,
        "side": "at most",
        "ok": must is None or found.median <= must,
        "rounds": rounds,
    }
    return told, raw
