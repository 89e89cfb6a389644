"""The memory that torch's CPU allocator hands out while something runs."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated_peak_of(act: Callable[[], Any]) -> tuple[int, Any]:
    """Return the highest number of bytes that an act allocated, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = act()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes, initial=0)), result
