"""Classify errors of the machine (disk, memory, permissions) as opposed to bugs in klinic.

Libraries report the same fault in several ways: Python as an `OSError` with an errno, Rust
(safetensors, tokenizers) and Arrow as text that contains the errno, torch as a `RuntimeError`.
"""

import errno
import os
import re

from klinic.errors import KlinicError, MachineError, error_text

ERRNO_PATTERN = re.compile(r"\((?:os )?error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
OUT_OF_MEMORY_TEXTS = (
    *("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc"),
    "failed to map segment",  # a shared library does not fit into memory
)
NO_THREAD_TEXT = "can't start new thread"

RESUME_ADVICE = "A run that it stopped continues with --resume."
DISK_SPACE_ADVICE = f"Free disk space, or use another disk. {RESUME_ADVICE}"
MEMORY_ADVICE = (
    "Close other programs, raise the limit (ulimit -v), or make the run smaller: klinic train "
    f"--dry-run shows the memory it needs. {RESUME_ADVICE}"
)
PERMISSION_ADVICE = f"Check owner and permissions of the path, or use another one. {RESUME_ADVICE}"
OPEN_FILES_ADVICE = f"Raise the limit (ulimit -n), or close other programs. {RESUME_ADVICE}"
MISSING_PATH_ADVICE = f"It was removed or never created: check the path. {RESUME_ADVICE}"
FILE_TYPE_ADVICE = "Check the type of the file at that path, or use another path."
ADVICE_BY_ERRNO = {
    errno.ENOSPC: DISK_SPACE_ADVICE,
    errno.EDQUOT: DISK_SPACE_ADVICE,
    errno.EFBIG: f"Raise the limit (ulimit -f), or use another disk. {RESUME_ADVICE}",
    errno.EROFS: f"Make the disk writable, or use another path. {RESUME_ADVICE}",
    errno.EACCES: PERMISSION_ADVICE,
    errno.EPERM: PERMISSION_ADVICE,
    errno.ENOENT: MISSING_PATH_ADVICE,
    errno.ESTALE: MISSING_PATH_ADVICE,
    errno.ENOTDIR: FILE_TYPE_ADVICE,
    errno.EISDIR: FILE_TYPE_ADVICE,
    errno.ELOOP: FILE_TYPE_ADVICE,
    errno.ENXIO: FILE_TYPE_ADVICE,
    errno.ENAMETOOLONG: "Use a shorter path.",
    errno.EMFILE: OPEN_FILES_ADVICE,
    errno.ENFILE: OPEN_FILES_ADVICE,
    errno.ENOMEM: MEMORY_ADVICE,
    errno.EAGAIN: f"Raise the process limit (ulimit -u). {RESUME_ADVICE}",
    errno.EIO: f"Check the disk. {RESUME_ADVICE}",
}
DEFAULT_ADVICE = f"Fix the cause, and try again. {RESUME_ADVICE}"


def as_machine_error(error: BaseException) -> MachineError | None:
    """Return the `MachineError` for a fault of the machine; None for every other error.

    >>> print(as_machine_error(OSError(28, "No space left on device", "runs/a/metrics.jsonl")))
    No space left on device: runs/a/metrics.jsonl. Free disk space, or use another disk. A run ...
    >>> as_machine_error(ValueError("wrong"))
    """
    if isinstance(error, KlinicError):
        return error if isinstance(error, MachineError) else None
    number = _error_number(error)
    if number is not None:
        advice = ADVICE_BY_ERRNO.get(number, DEFAULT_ADVICE)
        return MachineError(f"{os.strerror(number)}{_error_location(error)}. {advice}")
    return None if error.__cause__ is None else as_machine_error(error.__cause__)


def _error_number(error: BaseException) -> int | None:
    """Return the errno of the fault, for every way in which a library reports it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in errno.errorcode else None
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    text = error_text(error)
    match = ERRNO_PATTERN.search(text)
    if match is not None:
        number = int(match[1] or match[2])
        return number if number in ADVICE_BY_ERRNO else None
    if isinstance(error, RuntimeError | ImportError):
        if NO_THREAD_TEXT in text:
            return errno.EAGAIN
        if any(sign in text.lower() for sign in OUT_OF_MEMORY_TEXTS):
            return errno.ENOMEM
    return None


def _error_location(error: BaseException) -> str:
    names = [getattr(error, name, None) for name in ("filename", "filename2")]
    paths = [os.fsdecode(name) for name in names if isinstance(name, str | bytes)]
    if paths:
        return ": " + " -> ".join(paths)
    message = error_text(error).strip().partition("\n")[0][:200].rstrip(".")
    return f" ({type(error).__name__}: {message})" if message else ""
