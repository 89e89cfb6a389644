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


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    r"""Yield (number, kind, raw value) of every field of a message.

    >>> list(fields(b"\x08\x96\x01\x12\x02hi"))
    [(1, 0, 150), (2, 2, b'hi')]
    """
    place = 0
    while place < len(data):
        key, place = varint(data, place)
        kind = key & 7
        if kind == VARINT:
            value, place = varint(data, place)
            yield key >> 3, kind, value
            continue
        if kind == BYTES:
            size, place = varint(data, place)
        elif kind in (EIGHT, FOUR):
            size = 8 if kind == EIGHT else 4
        else:
            raise WireError(f"a field of kind {kind}")
        if place + size > len(data):
            raise WireError("a field that exceeds its message")
        yield key >> 3, kind, data[place : place + size]
        place += size


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    if place < len(data) and data[place] < 0x80:  # the usual case
        return data[place], place + 1
    value = 0
    for count in range(LONGEST_VARINT):
        if place + count >= len(data):
            raise WireError("a number that exceeds its message")
        byte = data[place + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, place + count + 1
    raise WireError("a number of more than ten bytes")
