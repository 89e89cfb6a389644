"""Durable small files: a reader sees the old content or the new one, never a half."""

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from klinic.errors import EvidenceError

CHUNK = 1 << 20  # bytes hashed at a time: checkpoints do not fit in memory twice


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    # named by process and thread: two writers never share a temporary file
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; what cannot be read is an `EvidenceError` naming it."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise EvidenceError(
            f"{path}: cannot be read ({error.strerror}). Check that the folder is that of a run."
        ) from error
    except (ValueError, RecursionError) as error:
        raise EvidenceError(
            f"{path}: is not JSON ({error}). It was cut short or edited; restore it from a copy."
        ) from error
    if not isinstance(value, dict):
        raise EvidenceError(
            f"{path}: holds a JSON {type(value).__name__}, not an object with named values. "
            "It was written by something else; restore it from a copy."
        )
    return value


def json_bytes(value: Mapping[Any, Any]) -> bytes:
    """Return one line of strict JSON. NaN and infinity become null, NumPy numbers plain ones.

    >>> json_bytes({"loss": float("nan"), "step": np.int64(3)})
    b'{"loss": null, "step": 3}'
    """
    return json.dumps(_plain(value), allow_nan=False).encode()


class Journal:
    """A file of one JSON object a line that only grows. It has one writer and any readers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mended = False

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry with a single write, so that a reader sees at most one torn line."""
        line = json_bytes(entry) + b"\n"
        if not self._mended:
            self._mend()
        self._mended = False  # a write that fails on a full disk leaves a torn line, too
        with self.path.open("ab") as file:
            file.write(line)
        self._mended = True

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries. A torn last line is skipped, a broken one before it is an error."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                entry = parse_line(line)
                if entry is not None:
                    yield entry
                elif line.endswith(b"\n"):
                    raise EvidenceError(
                        f"{self.path}, line {number}: is not a JSON object. The file was damaged "
                        "after it was written; restore it from a copy or delete the line."
                    )

    def rewind(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the entries to keep; a torn last line goes as well."""
        kept = [json_bytes(entry) + b"\n" for entry in self.entries() if keep(entry)]
        write_atomically(self.path, b"".join(kept))

    def _mend(self) -> None:
        """Repair the end that a killed writer left, so that the next line starts a line."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
        if tail:
            write_atomically(self.path, data + b"\n" if parse_line(tail) is not None else whole)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the entry on a line of a journal; None where it is not one JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(line)
        if isinstance(entry, dict):
            return entry
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder last through a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
