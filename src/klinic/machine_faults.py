"""Classify errors of the machine (disk, memory, permissions) as opposed to bugs in klinic.

Libraries report the same fault in several ways: Python as an `OSError` with an errno, Rust
(safetensors, tokenizers) and Arrow as text that contains the errno, torch as a `RuntimeError`.
"""

import errno
import os
import re

from klinic.errors import KlinicError, MachineError, text_of

NUMBER = re.compile(r"\((?:os )?error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
NO_MEMORY = (
    *("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc"),
    "failed to map segment",  # a shared library does not fit into memory
)
NO_THREAD = "can't start new thread"

RESUME = "A run that it stopped continues with --resume."
ROOM = f"Free disk space, or use another disk. {RESUME}"
MEMORY = (
    "Close other programs, raise the limit (ulimit -v), or make the run smaller: klinic train "
    f"--dry-run shows the memory it needs. {RESUME}"
)
RIGHTS = f"Check owner and permissions of the path, or use another one. {RESUME}"
FILES = f"Raise the limit (ulimit -n), or close other programs. {RESUME}"
MISSING = f"It was removed or never created: check the path. {RESUME}"
KIND = "Check the type of the file at that path, or use another path."
ADVICE = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: f"Raise the limit (ulimit -f), or use another disk. {RESUME}",
    errno.EROFS: f"Make the disk writable, or use another path. {RESUME}",
    errno.EACCES: RIGHTS,
    errno.EPERM: RIGHTS,
    errno.ENOENT: MISSING,
    errno.ESTALE: MISSING,
    errno.ENOTDIR: KIND,
    errno.EISDIR: KIND,
    errno.ELOOP: KIND,
    errno.ENXIO: KIND,
    errno.ENAMETOOLONG: "Use a shorter path.",
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.ENOMEM: MEMORY,
    errno.EAGAIN: f"Raise the process limit (ulimit -u). {RESUME}",
    errno.EIO: f"Check the disk. {RESUME}",
}
OTHER = f"Fix the cause, and try again. {RESUME}"


def machine_fault(error: BaseException) -> MachineError | None:
    """Return the `MachineError` for a fault of the machine; None for every other error.

    >>> print(machine_fault(OSError(28, "No space left on device", "runs/a/metrics.jsonl")))
    No space left on device: runs/a/metrics.jsonl. Free disk space, or use another disk. A run ...
    >>> machine_fault(ValueError("wrong"))
    """
    if isinstance(error, KlinicError):
        return error if isinstance(error, MachineError) else None
    number = _number(error)
    if number is not None:
        advice = ADVICE.get(number, OTHER)
        return MachineError(f"{os.strerror(number)}{_place(error)}. {advice}")
    return None if error.__cause__ is None else machine_fault(error.__cause__)


def _number(error: BaseException) -> int | None:
    """Return the errno of the fault, for every way in which a library reports it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in errno.errorcode else None
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    text = text_of(error)
    found = NUMBER.search(text)
    if found is not None:
        number = int(found[1] or found[2])
        return number if number in ADVICE else None
    if isinstance(error, RuntimeError | ImportError):
        if NO_THREAD in text:
            return errno.EAGAIN
        if any(sign in text.lower() for sign in NO_MEMORY):
            return errno.ENOMEM
    return None


def _place(error: BaseException) -> str:
    names = [getattr(error, name, None) for name in ("filename", "filename2")]
    paths = [os.fsdecode(name) for name in names if isinstance(name, str | bytes)]
    if paths:
        return ": " + " -> ".join(paths)
    said = text_of(error).strip().partition("\n")[0][:200].rstrip(".")
    return f" ({type(error).__name__}: {said})" if said else ""
