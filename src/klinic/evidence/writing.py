"""Atomic and durable file writes that never follow symbolic links; klinic writes files only here.

A run folder is untrusted: a symbolic link in it could point to any file of the user. Files are
written under a random name and renamed, which replaces a link; logs are opened without following
links. Libraries write (weights, event files) into folders that are created here.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from klinic.errors import EvidenceError

SAFE_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_FLAGS
# opening a pipe without a reader fails instead of blocking
APPEND_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | SAFE_FLAGS
MODE = 0o666  # before the user's umask
NAME_PREFIX_LENGTH = 32  # leading characters of a name in its temporary file


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: complete or not at all, also after a power cut."""
    refuse_special(path)
    # a random name: unique per writer, and no link can be placed there in advance
    temporary = path.with_name(f".{path.name[:NAME_PREFIX_LENGTH]}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync a file; its directory entry is durable once the folder is synced."""
    refuse_special(path)
    path.unlink(missing_ok=True)
    _write_new(path, data)


def write_chunks(path: Path, chunks: Iterable[bytes]) -> None:
    """Write and fsync a file from pieces of its content, replacing the one that is there."""
    refuse_special(path)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, CREATE_FLAGS, MODE), "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, without waiting for the disk."""
    with os.fdopen(os.open(path, CREATE_FLAGS, MODE), "wb") as file:
        file.write(data)


def open_log(path: Path) -> IO[bytes]:
    """Open a file for appending; raise `EvidenceError` for a link, a pipe or a device."""
    try:
        handle = os.open(path, APPEND_FLAGS, MODE)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}:
            raise EvidenceError(_not_a_file_message(path)) from error
        raise
    file = os.fdopen(handle, "ab")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise EvidenceError(_not_a_file_message(path))
    return file


def refuse_special(path: Path) -> None:
    """Raise `EvidenceError` if the path is a folder, a pipe or a device."""
    for look in (path.lstat, path.stat):
        try:
            mode = look().st_mode
        except OSError:  # missing, or a broken link
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise EvidenceError(_not_a_file_message(path))


def refuse_link(path: Path) -> None:
    """Raise `EvidenceError` for a symbolic link, before a file is changed in place."""
    if path.is_symlink():
        raise EvidenceError(_not_a_file_message(path))


def make_fresh_folder(path: Path) -> None:
    """Create an empty folder, removing whatever exists there; of a link, the link alone."""
    remove_tree(path)
    path.mkdir(parents=True)


def remove_tree(path: Path) -> None:
    """Remove a folder or a file; of a link, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def refuse_links_out(run: Path) -> None:
    """Raise `EvidenceError` if a run folder contains a link that points outside of it."""
    inside = run.resolve()
    for link in _find_links(run):
        # W&B creates this link to its own log, and does not write through it
        if link.match("wandb/*/logs/debug-core.log"):
            continue
        if not link.resolve().is_relative_to(inside):
            raise EvidenceError(
                f"{link}: is a symbolic link to {link.readlink()}, outside of the run folder, and "
                "klinic writes nothing outside of it. Replace the link by the files, or remove "
                "it."
            )


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _find_links(run: Path) -> Iterator[Path]:
    """Yield the links in a run folder, at any depth but in `records`, whose files are replaced."""
    for folder, folders, files in os.walk(run):
        yield from (Path(folder, name) for name in (*folders, *files) if _is_link(folder, name))
        if Path(folder) == run / "records":  # it has thousands of folders
            folders.clear()


def _is_link(folder: str, name: str) -> bool:
    return os.path.islink(os.path.join(folder, name))  # noqa: PTH114, PTH118 - of many files


def _write_new(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, CREATE_FLAGS, MODE), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _not_a_file_message(path: Path) -> str:
    kind = "a symbolic link" if path.is_symlink() else "a folder, a pipe or a device"
    return (
        f"{path}: is {kind}, and klinic writes only to regular files of its own. Remove "
        "it, or choose another path."
    )
