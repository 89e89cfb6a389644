"""Bounded reads of run files, and journals with one JSON object per line."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from klinic.errors import EvidenceError, UnreadableError
from klinic.evidence.writing import open_log, refuse_link, write_atomically
from klinic.runtime.regular_file import BUFFER_BYTES, NotRegularError, open_regular

LARGEST = 1 << 23  # bytes of a JSON file of a run; parsed it may take twenty times as many
LONGEST = 1 << 24  # bytes of a line of tokens: a completion of 170,000 tokens in six columns
LONGEST_ENTRY = 1 << 20  # bytes of any other line: a step's metrics have a few thousand
MOST_CONTAINERS = 1 << 18  # lists and objects of a JSON text: 3 bytes each as text, 64 parsed
MACHINE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
SMALL = 1 << 16  # bytes; smaller files are not checked for holes


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(BUFFER_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(
    path: Path, *, largest: int = LARGEST, most_containers: int = MOST_CONTAINERS
) -> dict[str, Any]:
    """Return the JSON object in a file; raise `EvidenceError` if it cannot be read."""
    return parse_object(read_bytes(path, largest=largest), path, most_containers=most_containers)


def parse_object(
    data: bytes, path: Path, *, most_containers: int = MOST_CONTAINERS
) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file."""
    try:
        value = parse_json(data, most_containers=most_containers)
    except ValueError as error:
        raise EvidenceError(
            f"{path}: is not JSON ({error}). It was cut short or edited; restore it from a copy."
        ) from error
    if not isinstance(value, dict):
        raise EvidenceError(
            f"{path}: holds a JSON {type(value).__name__}, not an object with named values. "
            "It was written by something else; restore it from a copy."
        )
    return value


def parse_json(data: bytes, *, most_containers: int = MOST_CONTAINERS) -> Any:
    """Return the value of a JSON text; raise `ValueError` if it is none or too large."""
    if data.count(b"[") + data.count(b"{") > most_containers:
        raise ValueError(f"more than {most_containers:,} lists and objects")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("lists or objects inside each other too often") from error


def read_bytes(path: Path, *, largest: int) -> bytes:
    """Return the bytes of a file; raise `EvidenceError` if it is too large or sparse."""
    with open_file(path) as file:
        refuse_sparse(file, path)
        size = os.fstat(file.fileno()).st_size
        try:  # files in /proc report size 0
            data = file.read(min(max(BUFFER_BYTES, size), largest) + 1) or b""
        except OSError as error:
            raise unreadable_error(path, error, size=size) from error
    if len(data) > largest:
        raise EvidenceError(
            f"{path}: is larger than {largest / 2**20:,.0f} MB, the limit for this file of a run. "
            "Check the path."
        )
    return data


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading; anything else raises `EvidenceError`."""
    try:
        return open_regular(path)
    except NotRegularError as error:
        raise EvidenceError(
            f"{path}: is not a regular file. Put the file of a run there, or remove it."
        ) from error
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from error


def unreadable_error(path: Path, error: Exception, *, size: int | None = None) -> EvidenceError:
    """Return the error for an unreadable file: `UnreadableError` if the machine is at fault.

    A file of size 0 has no bytes on a disk that could fail: it is a special file, as in /proc.
    """
    reason, number = getattr(error, "strerror", None) or str(error), getattr(error, "errno", None)
    is_special = number == errno.EIO and size == 0
    kind = UnreadableError if number in MACHINE_ERRNOS and not is_special else EvidenceError
    return kind(
        f"{path}: cannot be read ({reason}). Check that it exists and that you may read it."
    )


def refuse_sparse(file: IO[bytes], path: Path) -> None:
    """Raise `EvidenceError` for a sparse file: a tiny one can read as gigabytes of zeros."""
    size = os.fstat(file.fileno()).st_size
    if size <= SMALL or not hasattr(os, "SEEK_HOLE"):
        return
    try:
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
    except OSError:
        return  # the file system cannot report holes
    if hole < size:
        raise EvidenceError(
            f"{path}: has a hole at byte {hole:,} of {size:,}, so it is not what a run wrote. "
            "Restore it from a copy."
        )


def numbered_lines(path: Path, *, longest: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of a file; raise `EvidenceError` for a line that is too long."""
    longest = LONGEST if longest is None else longest
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if size <= longest:  # so no line is longer
                yield from enumerate(file, 1)
            else:
                yield from _long_lines(file, path, longest)
        except OSError as error:
            raise unreadable_error(path, error, size=size) from error


def _long_lines(file: IO[bytes], path: Path, longest: int) -> Iterator[tuple[int, bytes]]:
    pieces: list[bytes] = []
    size, number = 0, 1
    while piece := file.readline(BUFFER_BYTES):
        pieces.append(piece)
        size += len(piece)
        # a hole in a file reads as zeros
        if b"\0" in piece or size > longest:
            raise EvidenceError(
                f"{path}, line {number}: is longer than {longest >> 20} MB or holds zero bytes, so "
                "the file is not a log. Check the path."
            )
        if piece.endswith(b"\n"):
            yield number, b"".join(pieces)
            pieces, size, number = [], 0, number + 1
    if pieces:
        yield number, b"".join(pieces)


def json_bytes(value: Mapping[Any, Any]) -> bytes:
    """Return one line of strict JSON. NaN and infinity become null, NumPy scalars Python numbers.

    >>> import numpy as np
    >>> json_bytes({"loss": float("nan"), "step": np.int64(3)})
    b'{"loss": null, "step": 3}'
    """
    return json.dumps(_to_json_value(value), allow_nan=False).encode()


class Journal:
    """An append-only file with one JSON object per line, one writer and any number of readers."""

    def __init__(self, path: Path, *, longest: int = LONGEST_ENTRY) -> None:
        self.path = path
        self._longest = longest
        self._tail_is_whole = False

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry with a single write, so that a reader sees at most one torn line."""
        line = json_bytes(entry) + b"\n"
        if not self._tail_is_whole:
            self._repair_tail()
        self._tail_is_whole = False  # a failed write, as on a full disk, also leaves a torn line
        with open_log(self.path) as file:
            file.write(line)
        self._tail_is_whole = True

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries. Skips a torn last line; raises on a broken line before it."""
        if not self.path.exists():
            return
        for number, line in numbered_lines(self.path, longest=self._longest):
            entry = parse_line(line)
            if entry is not None:
                yield entry
            elif line.endswith(b"\n"):
                raise EvidenceError(
                    f"{self.path}, line {number}: is not a JSON object. The file was damaged "
                    "after it was written; restore it from a copy or delete the line."
                )

    def rewind(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the entries that `keep` accepts; drops a torn last line."""
        if not self.path.exists():
            return
        lines = [json_bytes(entry) + b"\n" for entry in self.entries() if keep(entry)]
        write_atomically(self.path, b"".join(lines))

    def _repair_tail(self) -> None:
        """Repair a torn last line of a killed writer, so that the next entry starts a new line."""
        refuse_link(self.path)
        if not self.path.exists():
            return
        with open_file(self.path) as file:
            data = file.read()
        whole, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
        if tail:
            write_atomically(self.path, data + b"\n" if parse_line(tail) is not None else whole)
        elif self.path.stat().st_nlink > 1:  # break the hard link: the other file must not grow
            write_atomically(self.path, data)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the entry on a line of a journal; None if it is not one JSON object."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _to_json_value(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy, without importing it
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
