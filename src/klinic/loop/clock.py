"""Wall-clock seconds of a step by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Accumulates the seconds of code blocks by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Add the duration of a block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
