"""Zip archives of uncompressed files: what a bundle is written as, and a strict reader of them.

`zipfile` reads many more archives than it writes: compressed members that expand without limit,
members that overlap, data between members. The reader here takes files that are stored one after
the other without a gap, so nothing can expand, and everything in an archive is listed.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from klinic.errors import EvidenceError

LOCAL, ENTRY, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
LOCAL_FORMAT = struct.Struct("<4s5H3I2H")
ENTRY_FORMAT = struct.Struct("<4s6H3I5H2I")
END_FORMAT = struct.Struct("<4s4H2IH")
NO_TIME = (1980, 1, 1, 0, 0, 0)  # the first date of the format: when files were made is not told
MOST_MEMBERS = 0xFFFE


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file in an archive."""

    name: str
    data: memoryview


def pack_files(files: Iterable[tuple[str, bytes]]) -> bytes:
    """Return an archive of (name, data), in this order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name, NO_TIME), data)
    return buffer.getvalue()


def starts_with_member(begins: bytes, name: str) -> bool:
    """Whether the first bytes of a file are those of an archive whose first file has this name."""
    start = LOCAL_FORMAT.size
    return begins.startswith(LOCAL) and begins[start : start + len(name)] == name.encode()


def read_members(data: bytes, path: Path) -> Iterator[Member]:
    """Yield the files of an archive; raise `EvidenceError` for anything but stored files."""
    try:
        yield from _read_members(memoryview(data))
    except (struct.error, ValueError) as error:
        raise EvidenceError(
            f"{path}: is not an archive that `klinic bundle` wrote ({error}). Make it again, and "
            "send it as a file."
        ) from error


def _read_members(data: memoryview) -> Iterator[Member]:
    """Read the directory at the end, and compare every entry with the file that it lists."""
    directory, num = _find_directory(data)
    position, entry_position, names = 0, directory, set()
    for _ in range(num):
        entry = ENTRY_FORMAT.unpack_from(data, entry_position)
        name_start = entry_position + ENTRY_FORMAT.size
        name = _name_at(data, name_start, entry[10])
        member, end = _read_local(data, position, entry, name)
        if name in names:
            raise ValueError(f"{name[:80]!r} occurs twice")
        names.add(name)
        yield member
        position, entry_position = end, name_start + entry[10]
    if position != directory or entry_position != len(data) - END_FORMAT.size:
        raise ValueError("it has data that no entry lists")


def _find_directory(data: memoryview) -> tuple[int, int]:
    """Return the position of the directory, and the number of its entries."""
    end = END_FORMAT.unpack_from(data, max(len(data) - END_FORMAT.size, 0))
    magic, *disks, num_here, num, size, start, comment = end
    is_plain = magic == END and not any(disks) and not comment and num_here == num
    if not is_plain or num > MOST_MEMBERS or start + size + END_FORMAT.size != len(data):
        raise ValueError("its end is not that of a plain zip file")
    return start, num


def _read_local(
    data: memoryview, position: int, entry: tuple[bytes | int, ...], name: str
) -> tuple[Member, int]:
    """Return the file at a position, as its entry lists it, and where it ends."""
    magic, _, _, flags, method, _, _, checksum, size, full_size, _, extra, comment, *rest = entry
    local = LOCAL_FORMAT.unpack_from(data, position)
    start = position + LOCAL_FORMAT.size + local[9]
    if magic != ENTRY or local[0] != LOCAL or rest[-1] != position or extra or comment or local[10]:
        raise ValueError("its files do not follow one another without a gap")
    if (flags, method, size, full_size) != (0, 0, local[8], local[7]) or size != full_size:
        raise ValueError(f"{name[:80]!r} is compressed or encrypted")
    if (local[2], local[3]) != (0, 0) or _name_at(data, start - local[9], local[9]) != name:
        raise ValueError(f"{name[:80]!r} has another name or form than its entry")
    content = data[start : start + local[7]]
    if len(content) != local[7] or zlib.crc32(content) != checksum:
        raise ValueError(f"{name[:80]!r} is damaged")
    return Member(name=name, data=content), start + local[7]


def _name_at(data: memoryview, start: int, length: int) -> str:
    return str(data[start : start + length], "ascii")
