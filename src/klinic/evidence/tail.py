"""Follows a journal while another process appends to it, rewinds it or dies.

Each poll reads a few megabytes at most, so memory does not grow with the journal.
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

AT_ONCE = 2 * LONGEST_ENTRY  # bytes read per poll
MAX_REPEATED = 1_000  # lines repeated after a rewind: more steps than a screen shows


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalUpdate:
    """The change of a journal since the last poll."""

    lines: tuple[bytes, ...]
    """New complete lines; a partial line is returned by a later poll."""
    remaining: tuple[bytes, ...] | None = None
    """After a rewind, the last lines that remain; None if no line was removed."""
    has_more: bool = False
    """Whether more lines can be read at once."""


class JournalTail:
    """Follows one journal. A replaced file is compared from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._line_hashes = array("q")  # hash of every line read

    def read_update(self) -> JournalUpdate:
        """Return the change since the last call; raise `EvidenceError` if it is no journal."""
        remaining = None
        if self._was_replaced():
            self.close()
            if self._path.exists():
                # kept open, so that its inode number cannot be reused while it is compared
                self._file = open_file(self._path)
            remaining = self._skip_unchanged()
        lines = self._whole_lines()
        self._line_hashes.extend(map(hash, lines))
        return JournalUpdate(
            lines=lines, remaining=remaining, has_more=bool(lines) and self._has_more()
        )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._offset = None, 0

    def _was_replaced(self) -> bool:
        """Whether the journal was replaced, truncated or removed since the last poll."""
        if self._file is None:
            return self._path.exists() or bool(self._line_hashes)
        try:
            there, read = self._path.stat(), os.fstat(self._file.fileno())
        except OSError:
            return True
        return not os.path.samestat(there, read) or there.st_size < self._offset

    def _has_more(self) -> bool:
        return self._file is not None and os.fstat(self._file.fileno()).st_size > self._offset

    def _whole_lines(self) -> tuple[bytes, ...]:
        if self._file is None:
            return ()
        self._file.seek(self._offset)
        data = self._file.read(AT_ONCE) or b""
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) > LONGEST_ENTRY:
            raise EvidenceError(
                f"{self._path}: has a line of more than {LONGEST_ENTRY >> 20} MB at byte "
                f"{self._offset:,}, so it is not the journal of a run. Check the "
                "path."
            )
        self._offset += len(whole)
        return tuple(whole.splitlines(keepends=True))

    def _skip_unchanged(self) -> tuple[bytes, ...] | None:
        """Skip the unchanged lines; return the last of them if lines were removed, else None."""
        remaining: deque[bytes] = deque(maxlen=MAX_REPEATED)
        num = 0
        for line in self._reread_lines():
            if num == len(self._line_hashes) or hash(line) != self._line_hashes[num]:
                break
            remaining.append(line)
            num += 1
            self._offset += len(line)
        if num == len(self._line_hashes):
            return None  # only its end was repaired; no line was removed
        del self._line_hashes[num:]
        return tuple(remaining)

    def _reread_lines(self) -> Iterator[bytes]:
        """Yield the complete lines of the file from its beginning, up to one that is too long."""
        while self._file is not None and (line := self._file.readline(LONGEST_ENTRY)):
            if not line.endswith(b"\n"):
                return
            yield line
