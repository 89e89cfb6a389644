"""Decodes protobuf messages without a schema: field numbers and raw values.

A field is a varint `number << 3 | kind` and a value: 0 a varint, 1 eight bytes, 2 a varint length
and that many bytes, 5 four bytes. (3 and 4, groups, are obsolete.)
Source: protobuf.dev, Encoding.
"""

from collections.abc import Iterator

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
LONGEST_VARINT = 10  # bytes


class WireError(ValueError):
    """Raised for bytes that are not a valid protobuf or Thrift message."""


def read_fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    r"""Yield (number, kind, raw value) of every field of a message.

    >>> list(read_fields(b"\x08\x96\x01\x12\x02hi"))
    [(1, 0, 150), (2, 2, b'hi')]
    """
    offset = 0
    while offset < len(data):
        key, offset = read_varint(data, offset)
        kind = key & 7
        if kind == VARINT:
            value, offset = read_varint(data, offset)
            yield key >> 3, kind, value
            continue
        if kind == BYTES:
            size, offset = read_varint(data, offset)
        elif kind in (EIGHT, FOUR):
            size = 8 if kind == EIGHT else 4
        else:
            raise WireError(f"a field of kind {kind}")
        if offset + size > len(data):
            raise WireError("a field that exceeds its message")
        yield key >> 3, kind, data[offset : offset + size]
        offset += size


def read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    if offset < len(data) and data[offset] < 0x80:  # the usual case
        return data[offset], offset + 1
    value = 0
    for count in range(LONGEST_VARINT):
        if offset + count >= len(data):
            raise WireError("a number that exceeds its message")
        byte = data[offset + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, offset + count + 1
    raise WireError("a number of more than ten bytes")
