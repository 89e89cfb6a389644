"""Reads offline runs of Weights & Biases (`run-*.wandb`) without wandb.

    file     ":W&B", 0xBEE1, version 0 (seven bytes); then blocks of 32768 bytes, as LevelDB's log
    chunk    checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last), data
    record   protobuf; 2 is history
    history  1 item, repeated; 2 step, with 1 its number
    item     1 key, 2 nested_key (repeated), 16 value_json

The checksum is CRC-32 of kind and data. A truncated last chunk is ignored, since the run may be
training or killed; any other damage is an error.
Source: wandb/sdk/internal/datastore.py and wandb/proto/wandb_internal.proto.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from klinic.errors import EvidenceError
from klinic.evidence.files import open_file
from klinic.evidence.readers.json_lines import add_entry
from klinic.evidence.readers.log import LogBuilder, ScalarLog
from klinic.evidence.readers.wire import WireError, read_fields

SUFFIX = ".wandb"
MAGIC = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK, HEADER = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
LARGEST = 1 << 24  # bytes of a record: a step's metrics are a few thousand
LONGEST_VALUE = 64  # characters: a longer value is not a number


def read_log(path: Path) -> ScalarLog:
    """Return the history of a run as a scalar log."""
    builder = LogBuilder()
    for number, data in enumerate(read_records(path), 1):
        try:
            entry = parse_history(data)
        except (WireError, UnicodeDecodeError) as error:
            raise EvidenceError(
                f"{path}: record {number} is not a W&B record ({error}). Pass the file that wandb "
                "wrote, or export the run's history as JSON lines."
            ) from error
        if entry is not None:
            add_entry(builder, entry)
    return builder.build_log(format="W&B offline run", files=(path,))


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, except those too large for metrics."""
    with open_file(path) as file:
        if file.read(HEADER) != MAGIC:
            raise EvidenceError(
                f"{path}: does not have the header of a W&B file. Pass the `run-....wandb` of an "
                "offline run, or its folder."
            )
        record: bytearray | None = None
        for kind, data in _read_chunks(file, path):
            if (kind in (WHOLE, FIRST)) != (record is None):
                raise _chunk_error(path, file)
            record = bytearray() if record is None else record
            if len(record) <= LARGEST:
                record += data
            if kind in (WHOLE, LAST):
                if len(record) <= LARGEST:
                    yield bytes(record)
                record = None


def _read_chunks(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    offset = HEADER
    while True:
        left = BLOCK - offset % BLOCK
        if left < HEADER:
            offset += len(file.read(left))
        header = file.read(HEADER)
        if len(header) < HEADER:
            return
        checksum, length, kind = struct.unpack("<IHB", header)
        data = file.read(length)
        if len(data) < length:
            return
        if not WHOLE <= kind <= LAST or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise _chunk_error(path, file)
        offset += HEADER + length
        yield kind, data


def _chunk_error(path: Path, file: IO[bytes]) -> EvidenceError:
    return EvidenceError(
        f"{path}: the chunk that ends at byte {file.tell()} has a wrong checksum or order. The "
        "file was damaged after it was written; restore it from a copy."
    )


def parse_history(record: bytes) -> dict[str, Any] | None:
    """Return the metrics of a history record; None for another kind."""
    for number, _, value in read_fields(record):
        if number == 2 and isinstance(value, bytes):
            return _parse_entry(value)
    return None


def _parse_entry(data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    step: int | None = None
    for number, _, value in read_fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            name, text = _parse_item(value)
            if len(text) <= LONGEST_VALUE:
                entry[name] = _parse_value(text)
        elif number == 2:
            step = next((v for n, _, v in read_fields(value) if n == 1 and isinstance(v, int)), 0)
    if step is not None:
        entry.setdefault("_step", step)
    return entry


def _parse_item(data: bytes) -> tuple[str, bytes]:
    key, text = [], b""
    for number, _, value in read_fields(data):
        if isinstance(value, bytes):
            if number in (1, 2):
                key.append(value.decode())
            elif number == 16:
                text = value
    return "/".join(key), text


def _parse_value(text: bytes) -> Any:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return ""  # not a number: counted as skipped
