"""The lines of a journal as they come, while another process writes it, cuts it back or dies.

A look reads a few megabytes at most, so that a journal of any length costs little memory.
"""

import os
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from klinic.errors import EvidenceError
from klinic.evidence.files import LONGEST_ENTRY, open_file

AT_ONCE = 2 * LONGEST_ENTRY  # bytes read in one look
KEPT = 1_000  # lines told again after a journal was cut back: more steps than a screen shows


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is new in a journal since it was last looked at."""

    lines: tuple[bytes, ...]
    """Whole lines; one that is still being written comes the next time."""
    kept: tuple[bytes, ...] | None = None
    """Where lines were taken back: the last of those before them, which still begin the file."""
    more: bool = False
    """Whether there is more to read at once."""


class Tail:
    """The end of a journal. A file that was put in its place is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._place = 0
        self._seen = array("q")  # a hash of every line

    def news(self) -> News:
        """Return what was written since the last call; no journal is an `EvidenceError`."""
        kept = None
        if self._replaced():
            self.close()
            if self._path.exists():
                # kept open, so that nothing else can get this file's number while it is compared
                self._file = open_file(self._path)
            kept = self._compare()
        lines = self._whole_lines()
        self._seen.extend(map(hash, lines))
        return News(lines=lines, kept=kept, more=bool(lines) and self._has_more())

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

    def _has_more(self) -> bool:
        return self._file is not None and os.fstat(self._file.fileno()).st_size > self._place

    def _whole_lines(self) -> tuple[bytes, ...]:
        if self._file is None:
            return ()
        self._file.seek(self._place)
        data = self._file.read(AT_ONCE) or b""
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) > LONGEST_ENTRY:
            raise EvidenceError(
                f"{self._path}: has a line of more than {LONGEST_ENTRY >> 20} MB at byte "
                f"{self._place:,}, so it is no journal of a run. Check that it is the file you "
                "mean."
            )
        self._place += len(whole)
        return tuple(whole.splitlines(keepends=True))

    def _compare(self) -> tuple[bytes, ...] | None:
        """Pass over the lines that were there before; return the last of them if some are gone."""
        kept: deque[bytes] = deque(maxlen=KEPT)
        num = 0
        for line in self._lines_again():
            if num == len(self._seen) or hash(line) != self._seen[num]:
                break
            kept.append(line)
            num += 1
            self._place += len(line)
        if num == len(self._seen):
            return None  # it was mended at its end, and nothing is gone
        del self._seen[num:]
        return tuple(kept)

    def _lines_again(self) -> Iterator[bytes]:
        """Yield the whole lines of the file from its beginning, none that is too long."""
        while self._file is not None and (line := self._file.readline(LONGEST_ENTRY)):
            if not line.endswith(b"\n"):
                return
            yield line
