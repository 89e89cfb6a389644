"""The lines of a journal as they come, while another process writes it, cuts it back or dies."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is new in a journal since it was last looked at."""

    lines: tuple[bytes, ...]
    """Whole lines; one that is still being written comes the next time."""
    kept: tuple[bytes, ...] | None = None
    """Where lines were taken back: those before them, which still begin the file."""


class Tail:
    """The end of a journal. A file that was put in its place is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._place = 0
        self._seen: list[int] = []

    def news(self) -> News:
        """Return what was written since the last call."""
        anew = self._replaced()
        if anew:
            self.close()
            with contextlib.suppress(OSError):
                # kept open, so that nothing else can get this file's number while it is compared
                self._file = self._path.open("rb")
        lines = self._whole_lines()
        if not anew or not self._seen:
            self._seen += map(hash, lines)
            return News(lines=lines)
        return self._compared(lines)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._place = None, 0

    def _replaced(self) -> bool:
        """Whether the file that was read is not, or no longer wholly, the one in its place."""
        if self._file is None:
            return self._path.exists() or bool(self._seen)
        try:
            there, read = self._path.stat(), os.fstat(self._file.fileno())
        except OSError:
            return True
        return not os.path.samestat(there, read) or there.st_size < self._place

    def _whole_lines(self) -> tuple[bytes, ...]:
        if self._file is None:
            return ()
        self._file.seek(self._place)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        return tuple(whole.splitlines(keepends=True))

    def _compared(self, lines: tuple[bytes, ...]) -> News:
        found = [hash(line) for line in lines]
        kept = 0
        for before, now in zip(self._seen, found, strict=False):
            if before != now:
                break
            kept += 1
        unchanged = kept == len(self._seen)  # it was mended at its end, and nothing is gone
        self._seen = found
        return News(lines=lines[kept:], kept=None if unchanged else lines[:kept])
