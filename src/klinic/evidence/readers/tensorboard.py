"""Reads TensorBoard event files without TensorBoard, which the base install does not include.

    record   length (8 bytes), its checksum (4), data, its checksum (4), little-endian
    data     Event: 2 step (varint), 5 summary
    summary  1 value, repeated
    value    1 tag, 2 simple_value (float), 8 tensor
    tensor   1 dtype, 4 tensor_content, 5 float_val, 6 double_val

The checksum is CRC-32C, rotated by 15 bits plus a constant. A truncated last record is ignored,
since the writer may be running or killed; any other damage is an error.
Source: tensorflow/core/lib/io/record_writer.h, tensorboard/compat/proto.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import open_file
from klinic.evidence.readers.log import LogBuilder, ScalarLog
from klinic.evidence.readers.wire import BYTES, EIGHT, FOUR, VARINT, WireError, read_fields

PART_OF_NAME = ".tfevents."
LARGEST = 1 << 20  # bytes of a scalar record: larger ones, images and graphs, are skipped
FLOAT, DOUBLE = 1, 2  # dtypes
POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed


def _crc_table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
        entries.append(crc)
    return tuple(entries)


CRC_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """Return the checksum of a record's bytes.

    >>> hex(masked_crc(b"123456789"))
    '0xc78ab0e5'
    """
    crc, table = 0xFFFFFFFF, CRC_TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_log(paths: tuple[Path, ...]) -> ScalarLog:
    """Return the scalars of the event files of one run; later files override earlier ones."""
    builder = LogBuilder()
    for path in paths:
        for data in read_records(path):
            try:
                for step, tag, value in event_scalars(data):
                    builder.add(step, {tag: value})
            except (WireError, UnicodeDecodeError) as error:
                raise EvidenceError(
                    f"{path}: has a record that is not an event ({error}). TensorBoard did not "
                    "write it; pass an event file."
                ) from error
    return builder.build_log(format="TensorBoard events", files=paths)


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the data of every complete record that may be a scalar."""
    with open_file(path) as file:
        number = 0
        while len(header := file.read(12)) == 12:
            number += 1
            length, checksum = struct.unpack("<QI", header)
            if masked_crc(header[:8]) != checksum:
                raise _checksum_error(path, number)
            if length > LARGEST:
                file.seek(length + 4, 1)
                continue
            body = file.read(length + 4)
            if len(body) < length + 4:
                return
            if masked_crc(body[:length]) != int.from_bytes(body[length:], "little"):
                raise _checksum_error(path, number)
            yield body[:length]
        if not number and header:
            raise _checksum_error(path, 1)


def _checksum_error(path: Path, number: int) -> EvidenceError:
    return EvidenceError(
        f"{path}: record {number} has a wrong checksum. It is not an event file, or it was "
        "damaged after it was written; restore it from a copy."
    )


def event_scalars(event: bytes) -> Iterator[tuple[int, str, float]]:
    """Yield (step, tag, value) of the scalars of an event."""
    step, values = 0, []
    for number, kind, value in read_fields(event):
        if number == 2 and kind == VARINT and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            values += [v for n, _, v in read_fields(value) if n == 1 and isinstance(v, bytes)]
    for entry in values:
        tag, scalar = _parse_value(entry)
        if scalar is not None:
            yield step, tag, scalar


def _parse_value(data: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, kind, value in read_fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1 and kind == BYTES:
            tag = value.decode()
        elif number == 2 and kind == FOUR:
            scalar = struct.unpack("<f", value)[0]
        elif number == 8 and kind == BYTES:
            scalar = _scalar_tensor(value)
    return tag, scalar


def _scalar_tensor(data: bytes) -> float | None:
    """Return the value of a scalar float tensor, or None."""
    dtype, content = 0, b""
    for number, kind, value in read_fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number in (4, 5, 6) and kind in (BYTES, FOUR, EIGHT) and isinstance(value, bytes):
            content = value
    form = {(FLOAT, 4): "<f", (DOUBLE, 8): "<d"}.get((dtype, len(content)))
    return None if form is None else float(struct.unpack(form, content)[0])


def sort_by_time(paths: list[Path]) -> tuple[Path, ...]:
    """Return event files by creation time, which their names encode."""
    return tuple(sorted(paths, key=lambda path: path.name))


def is_events(path: Path) -> bool:
    """Whether a path has the name of an event file."""
    return PART_OF_NAME in path.name
