"""The one place where klinic writes files: whole or not at all, and never through a link.

A run folder may come from anybody, and a symbolic link in it could lead to any file of the user. A
file is written under a random name and renamed, which replaces a link; a log that grows is opened
without following one. What libraries write (weights, event files) goes into folders made here.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from klinic.errors import EvidenceError

OWN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OWN
# a pipe without a reader is an error at once, and not a wait
GROWING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | OWN
MODE = 0o666  # less what the user's umask takes away
SHOWN = 32  # characters of a name that its temporary file repeats


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    refuse_special(path)
    # a random name: two writers never share it, and nobody can put a link there in advance
    temporary = path.with_name(f".{path.name[:SHOWN]}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file whose bytes stay, once something that stays as well names it."""
    refuse_special(path)
    path.unlink(missing_ok=True)
    _write_new(path, data)


def open_log(path: Path) -> IO[bytes]:
    """Return a file to append to; a link, a pipe or a device is an `EvidenceError`."""
    try:
        handle = os.open(path, GROWING, MODE)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}:
            raise EvidenceError(_not_a_file(path)) from error
        raise
    file = os.fdopen(handle, "ab")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise EvidenceError(_not_a_file(path))
    return file


def refuse_special(path: Path) -> None:
    """Refuse a place where a folder, a pipe or a device is: a rename would replace or enter it."""
    for look in (path.lstat, path.stat):
        try:
            mode = look().st_mode
        except OSError:  # not there, or a link to nothing
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise EvidenceError(_not_a_file(path))


def refuse_link(path: Path) -> None:
    """Refuse a place where a symbolic link is, for a file that is changed and not replaced."""
    if path.is_symlink():
        raise EvidenceError(_not_a_file(path))


def make_fresh_folder(path: Path) -> None:
    """Make an empty folder in place of whatever is there; a link goes, and not what it leads to."""
    remove_tree(path)
    path.mkdir(parents=True)


def remove_tree(path: Path) -> None:
    """Remove a folder or a file; of a link, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def refuse_links_out(run: Path) -> None:
    """Refuse a run folder that holds a link out of it, before anything is written there."""
    inside = run.resolve()
    for link in _links(run):
        # W&B makes this link to its own log, and writes to that log by the log's own name
        if link.match("wandb/*/logs/debug-core.log"):
            continue
        if not link.resolve().is_relative_to(inside):
            raise EvidenceError(
                f"{link}: is a symbolic link to {link.readlink()}, outside of the run folder, and "
                "klinic writes nothing outside of it. Put the files themselves there, or remove "
                "the link."
            )


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder last through a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _links(run: Path) -> Iterator[Path]:
    """Yield the links in a run folder, at any depth; files of a record are written anew."""
    for folder, folders, files in os.walk(run):
        yield from (Path(folder, name) for name in (*folders, *files) if _is_link(folder, name))
        if Path(folder) == run / "records":  # it has a folder for each of thousands of steps
            folders.clear()


def _is_link(folder: str, name: str) -> bool:
    return os.path.islink(os.path.join(folder, name))  # noqa: PTH114, PTH118 - of many files


def _write_new(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, NEW, MODE), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _not_a_file(path: Path) -> str:
    kind = "a symbolic link" if path.is_symlink() else "a folder, a pipe or a device"
    return (
        f"{path}: is {kind}, and klinic writes only to files of its own. Remove it, or give "
        "another place."
    )
