"""Faults of the machine are told from faults of klinic, however a library reports them."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from klinic.errors import ConfigError, MachineError
from klinic.runtime.machine_faults import as_machine_error


class SafetensorError(Exception):
    """As safetensors raises it: no OSError, and the number only in its text."""


def caused(cause):
    error = RuntimeError("the dataset could not be made")
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (FULL, "No space left on device: runs/a/metrics.jsonl. Free disk space"),
        (caused(FULL), "No space left on device: runs/a/metrics.jsonl. Free disk space"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left"),
        (OSError("[Errno 28] Error writing bytes. Detail: [errno 28] No space"), "No space left"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "No such file or directory: a"),
        (PermissionError(13, "Permission denied", b"a"), "Permission denied: a. Check owner"),
        (OSError(30, "Read-only file system", "a"), "Read-only file system: a. Make the disk"),
        (OSError(36, "File name too long", "a" * 300), "File name too long: aaa"),
        (OSError(24, "Too many open files"), "Too many open files (OSError: [Errno 24]"),
        (OSError(27, "File too large"), "File too large (OSError"),
        (IsADirectoryError(21, "Is a directory", "out"), "Is a directory: out. Check the type of"),
        (MemoryError(), "Cannot allocate memory. Close other programs"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "Cannot allocate"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "Resource temporarily unavailable"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "Cannot allocate"),
        (OSError(errno.EBADMSG, "Bad message"), "Bad message (OSError"),
    ],
)
def test_a_fault_of_the_machine_is_named_with_what_to_do(error, named):
    fault = as_machine_error(error)
    assert isinstance(fault, MachineError)
    assert str(fault).startswith(named)
    assert fault.exit_code == 4


@pytest.mark.parametrize(
    "error",
    [ValueError("out of memory"), TypeError("x"), OSError("no number"), ConfigError("wrong"),
     RuntimeError("shape (os error 999999)"), OSError(123456, "of another system")],
)  # fmt: skip
def test_other_errors_are_none(error):
    assert as_machine_error(error) is None


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("OSError(28, 'No space left on device', 'a')", 4, "MachineError: No space left on"),
        ("MemoryError()", 4, "MachineError: Cannot allocate memory"),
        ("TypeError('x')", 3, "Internal error (a bug in klinic): TypeError: x\n"),
    ],
)
def test_the_command_ends_with_its_exit_code(raised, code, said):
    program = (
        "from klinic.cli import app\n"
        f"def broken():\n    raise {raised}\n"
        "app.app = broken\napp.main()"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stderr.startswith(said)
    with Path("/dev/full").open("w") as full:  # where nothing can be said, the code still counts
        assert subprocess.run(command, stderr=full, check=False).returncode == code
