"""Returns freed memory to the operating system at once, where the C library is glibc.

glibc raises its threshold for that as large blocks are freed, up to 32 MiB, and keeps smaller ones.
While a model is loaded layer by layer, a process would keep as much again as it holds.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt
RETURNED_AT_ONCE = 2**17  # bytes, and more: the first threshold of a process
LARGEST_KEPT = 2**25  # the highest threshold that glibc raises itself to
SETTING = "MALLOC_MMAP_THRESHOLD_"
"""The environment variable with which a user has chosen a threshold."""


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return each large block when it is freed within the context; afterwards keep some again."""
    libc = _glibc()
    if libc is None or SETTING in os.environ:
        yield
        return
    libc.mallopt(MMAP_THRESHOLD, RETURNED_AT_ONCE)
    try:
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(TRIM_THRESHOLD, 2 * LARGEST_KEPT)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no library of that name
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
