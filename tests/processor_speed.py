"""Limits on processor time that mean the same on a slow host.

A shared host may need several times the processor time of a usual one for the same instructions.
A limit in bare seconds then measures the host. It is stretched by what a fixed piece of work costs
at the same moment, and never shortened.
"""

import time

ADDITIONS = 3_000_000
SECONDS = 0.25  # of processor time for them: about twice what a usual machine needs


def allowed_seconds(seconds: float) -> float:
    """Return a limit on processor time, longer if this machine is slow now."""
    return seconds * max(1.0, _seconds_of_additions() / SECONDS)


def _seconds_of_additions() -> float:
    begun = time.process_time()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return time.process_time() - begun
