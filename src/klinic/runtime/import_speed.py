"""Imports without garbage collection: they make many objects and hardly any garbage."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause the garbage collector; importing torch and transformers takes a seventh less time.

    What was imported is then left out of later collections until the process ends. The last
    collection frees it again: libraries report functions that are left over.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
