"""Reads structs of Thrift's compact protocol: Parquet footers and page headers.

A struct is a list of fields that ends with a zero byte. A field is a byte `delta << 4 | kind`,
where `delta` is the difference to the previous field number, and a value. pyarrow does not expose
page headers, and aborts the process on a column whose footer contradicts itself.
Source: thrift.apache.org, Thrift Compact protocol encoding.
"""

from typing import Any

from klinic.evidence.readers.wire import WireError, read_varint

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
FIXED = {TRUE: 0, FALSE: 0, BYTE: 1, DOUBLE: 8}  # bytes to skip
MAX_FIELD_NUMBER = 1 << 15
MAX_DEPTH = 8
LONG_LIST = 15  # marks a list whose length follows as a varint
Fields = dict[int, Any]


def read_struct(data: bytes, offset: int, depth: int = 0) -> tuple[Fields, int]:
    r"""Return the integers, lists and structs of a struct by `number << 4 | kind`, and its end.

    >>> read_struct(b"\x15\x06\x26\x01\x00", 0) == ({1 << 4 | I32: 3, 3 << 4 | I64: -1}, 5)
    True
    """
    fields: Fields = {}
    number, size = 0, len(data)
    if depth > MAX_DEPTH:
        raise WireError("a struct nested too deep")
    while offset < size:
        head = data[offset]
        offset += 1
        if not head:
            return fields, offset
        if head > LONG_LIST:
            number += head >> 4
        else:
            number, offset = read_number(data, offset)
        if not 0 < number < MAX_FIELD_NUMBER:
            raise WireError("a field without a number")
        key = number << 4 | (head & 15)
        if key in fields:
            raise WireError("a repeated field")
        fields[key], offset = _read_value(data, offset, head & 15, depth)
    raise WireError("a struct without an end")


def read_number(data: bytes, offset: int) -> tuple[int, int]:
    """Return a signed integer and the offset after it."""
    value, offset = read_varint(data, offset)
    return (value >> 1) ^ -(value & 1), offset


def _read_value(data: bytes, offset: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return a value (None for an unused kind) and the offset after it."""
    if I16 <= kind <= I64:
        return read_number(data, offset)
    if kind == STRUCT:
        return read_struct(data, offset, depth + 1)
    if kind in FIXED:
        return None, offset + FIXED[kind]
    if kind == BINARY:
        length, offset = read_varint(data, offset)
        return None, offset + length
    if kind in (LIST, SET):
        return _read_list(data, offset, depth)
    raise WireError(f"a field of kind {kind}, which Parquet does not use")


def _read_list(data: bytes, offset: int, depth: int) -> tuple[list[Any], int]:
    if offset >= len(data):
        raise WireError("a list without an end")
    if depth > MAX_DEPTH:
        raise WireError("a list nested too deep")
    kind, length = data[offset] & 15, data[offset] >> 4
    offset += 1
    if length == LONG_LIST:
        length, offset = read_varint(data, offset)
    kind = BYTE if kind in (TRUE, FALSE) else kind  # one byte each in a list
    values = []
    for _ in range(length):
        if offset >= len(data):
            raise WireError("a list without an end")
        value, offset = _read_value(data, offset, kind, depth + 1)
        values.append(value)
    return values, offset
