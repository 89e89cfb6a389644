"""Caches findings between diagnoses of a run, in the user's cache folder only.

The key of a value is a digest of all its inputs, so entries never become stale. Files are written
atomically, carry their SHA-256, and are evicted least recently used first. Read and write errors
count as a cache miss.
"""

import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from klinic import __version__
from klinic.errors import KlinicError
from klinic.evidence.writing import write_atomically
from klinic.runtime.cache import cache_folder

FOLDER = "findings"
SUFFIX = ".json"
MAX_BYTES = 1 << 28  # of all files: the findings of a hundred long runs
BLOCK = 4096  # bytes that a small file takes on disk
LONGEST = 1 << 24  # bytes of one file, far above any written here
FINDING_SOURCES = ("checks", "maths", "evidence", "doctor", "errors.py")
"""The parts of klinic that determine a finding."""


class FindingsCache:
    """A size-limited store of JSON values by digest."""

    def __init__(self, folder: Path, most_bytes: int = MAX_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._written = False

    def get(self, key: str) -> Any:
        """Return the value under a key, or None."""
        path = self._entry_path(key)
        try:
            if path.stat().st_size > LONGEST:
                return None
            digest, _, body = path.read_bytes().partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != digest:
                return None
            os.utime(path)  # last use, for eviction
            return json.loads(body)
        except (OSError, ValueError, RecursionError):
            return None

    def put(self, key: str, value: Any) -> None:
        """Store a value. Errors are suppressed: the next diagnosis only takes longer."""
        with suppress(KlinicError, OSError, TypeError, ValueError):
            body = json.dumps(value, separators=(",", ":")).encode()
            digest = hashlib.sha256(body).hexdigest().encode()
            write_atomically(self._entry_path(key), digest + b"\n" + body)
            self._written = True

    def trim(self) -> None:
        """Evict the least recently used files while the cache is too large."""
        if not self._written:
            return
        self._written = False
        with suppress(OSError):
            entries = [(entry.stat(), entry.path) for entry in os.scandir(self._folder)]
            entries.sort(key=lambda one: one[0].st_mtime_ns)
            left = sum(max(about.st_size, BLOCK) for about, _ in entries)
            for about, path in entries:
                if left <= self._most_bytes:
                    return
                left -= max(about.st_size, BLOCK)
                Path(path).unlink(missing_ok=True)

    def _entry_path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"


def open_cache() -> FindingsCache | None:
    """Return the user's cache of findings; None if its folder cannot be created."""
    try:
        return FindingsCache(cache_folder(FOLDER))
    except (KlinicError, OSError, RuntimeError):  # RuntimeError: no home folder
        return None


@cache
def checks_version() -> str:
    """Return a digest of all source files and library versions that determine a finding."""
    digest = hashlib.sha256()
    about = (__version__, np.__version__, pa.__version__, platform.python_version())
    digest.update(repr((*about, platform.machine())).encode())
    for name in FINDING_SOURCES:
        for path, source in _source_files(files("klinic").joinpath(name), name):
            digest.update(f"{path} {hashlib.sha256(source).hexdigest()}\n".encode())
    return digest.hexdigest()


def _source_files(node: Traversable, name: str) -> list[tuple[str, bytes]]:
    if node.is_file():
        return [(name, node.read_bytes())] if name.endswith(".py") else []
    inside = sorted(node.iterdir(), key=lambda child: child.name)
    return [pair for child in inside for pair in _source_files(child, f"{name}/{child.name}")]
