"""Limits on the Parquet files of a step, checked before a column is decoded.

A few kilobytes of Parquet can decode to gigabytes: a repeated value, a compressed run of zeros.
The memory of a step is limited to a multiple of its size on disk plus a constant. A column's size
comes from its page headers, because Arrow allocates by them and not by the footer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.readers.wire import WireError
from klinic.evidence.thrift import I32, I64, LIST, STRUCT, Fields, read_struct

MOST_PARTS = 16_384  # ranks that write one step
MOST_ROWS = 1 << 17  # completions of one step
LARGEST_FOOTER = 1 << 18  # bytes; klinic writes 5,000
LARGEST_STEP = 1 << 30  # bytes of all parts of a step
MIN_MEMORY = 2 << 20  # bytes that any step may decode to; 20 steps are in memory at once
EXPANSION = 64  # times the size on disk; log-probs hardly compress: real steps stay below 10
MOST_PAGES = 1 << 14  # per step; Arrow writes one per megabyte of a column
PAGES_PER_PART = 64  # further ones for each file: a column has one at least
FOOTER_END = 8  # bytes after the footer: its length and the magic number
WIDTH = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}  # bytes per value; others take 8
LIST_ENTRY = 8  # bytes of an offset: an empty list has one but no value
LARGEST_I32 = 1 << 31
THRIFT = {"thrift_string_size_limit": LARGEST_FOOTER, "thrift_container_size_limit": 1 << 14}
"""Limits on Arrow's allocations for a footer."""

# Fields of Parquet's structs, by number and kind. Source: parquet.thrift of parquet-format.
ROW_GROUPS = 4 << 4 | LIST
CHUNKS, GROUP_ROWS = 1 << 4 | LIST, 3 << 4 | I64  # of a row group
COLUMN = 3 << 4 | STRUCT  # of a chunk
LENGTH, DATA_AT, DICTIONARY_AT = 7 << 4 | I64, 9 << 4 | I64, 11 << 4 | I64  # of a column
SIZE, COMPRESSED_SIZE = 2 << 4 | I32, 3 << 4 | I32  # of a page
DICTIONARY = 7 << 4 | STRUCT
ENCODING = {5 << 4 | STRUCT: 2 << 4 | I32, DICTIONARY: 2 << 4 | I32, 8 << 4 | STRUCT: 4 << 4 | I32}
NUM_VALUES = 1 << 4 | I32  # of every kind of page
PLAIN = 0


@dataclass(frozen=True, slots=True)
class PageHeader:
    """The header of a page."""

    size: int
    """Uncompressed bytes."""
    num_values: int
    is_plain: bool
    """Whether values are stored one by one; other encodings may repeat a value in few bytes."""
    is_dictionary: bool


class MemoryBudget:
    """The memory that the parts of one step may still take."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        sizes = _file_sizes(folder, files)
        if sum(sizes) > LARGEST_STEP:
            raise EvidenceError(
                f"{folder}: the parts have {sum(sizes) >> 20:,} MB, and those of a step at most "
                f"{LARGEST_STEP >> 20:,} MB. Check that the files are records; write fewer tokens "
                "per step."
            )
        self._left = MIN_MEMORY + EXPANSION * sum(sizes)
        self._pages_left = MOST_PAGES + PAGES_PER_PART * len(files)

    def charge_columns(
        self,
        parquet: Any,
        data: bytes,
        *,
        rows: int,
        is_read: Callable[[str], bool],
        as_dictionaries: bool = False,
    ) -> None:
        """Deduct the decoded size of the columns that are read; raise if the budget is exceeded.

        With `as_dictionaries`, a text that repeats is decoded once.
        """
        num_rows = parquet.metadata.num_rows
        if num_rows > MOST_ROWS:
            raise EvidenceError(
                f"has {num_rows:,} rows, and a step at most {MOST_ROWS:,}. Write one row "
                "per completion."
            )
        groups = _row_groups(data)
        if not num_rows == sum(_unsigned_field(group, GROUP_ROWS) for group in groups) == rows:
            raise EvidenceError(
                f"has {num_rows} rows, which differs from its manifest ({rows}) or its row "
                "groups. Write the step again."
            )
        columns = parquet.metadata.schema
        for column_index in range(len(columns)):
            column = columns.column(column_index)
            if is_read(column.path.split(".")[0]):
                for group in groups:
                    pages = list(self._column_pages(data, group, column_index))
                    self._spend_memory(_decoded_bytes(pages, column, as_dictionaries))

    def _spend_memory(self, memory: int) -> None:
        self._left -= memory
        if self._left < 0:
            raise EvidenceError(
                f"decodes to more than {EXPANSION} times its size on disk, above the limit "
                "of any record. Write the step again."
            )

    def _column_pages(self, data: bytes, group: Fields, column_index: int) -> Iterator[PageHeader]:
        """Yield the pages of a column that Arrow may read."""
        column = group[CHUNKS][column_index][COLUMN]
        start, length = _unsigned_field(column, DATA_AT), _unsigned_field(column, LENGTH)
        if DICTIONARY_AT in column and 0 < column[DICTIONARY_AT] < start:
            start = column[DICTIONARY_AT]
        end = min(start + length, len(data))
        while start < end:
            self._pages_left -= 1
            if self._pages_left < 0:
                raise EvidenceError(f"has more than {MOST_PAGES:,} pages. Write larger pages.")
            header, start = read_struct(data, start)
            yield _parse_page(header)
            start += _unsigned_field(header, COMPRESSED_SIZE, LARGEST_I32)


def check_footer(data: bytes, path: Path) -> None:
    """Raise `EvidenceError` for a footer larger than any record's, before it is parsed."""
    length = _footer_length(data)
    if LARGEST_FOOTER < length < len(data):
        raise EvidenceError(
            f"{path}: has a footer of {length:,} bytes, and the limit is "
            f"{LARGEST_FOOTER:,}. Write the step again."
        )


def _footer_length(data: bytes) -> int:
    return int.from_bytes(data[-FOOTER_END : -FOOTER_END // 2], "little")


def _file_sizes(folder: Path, files: Sequence[str]) -> list[int]:
    """Return the sizes of a step's files; raise if two names refer to one file."""
    sizes: dict[tuple[int, int], int] = {}
    for name in files:
        try:
            status = (folder / name).stat()
        except OSError:
            continue  # reading it raises the error
        if (status.st_dev, status.st_ino) in sizes:
            raise EvidenceError(
                f"{folder}: the manifest names {name} twice, or two names of one file, so its "
                "rows would count twice. Write the step again."
            )
        sizes[status.st_dev, status.st_ino] = status.st_size
    return list(sizes.values())


def _row_groups(data: bytes) -> list[Fields]:
    footer, _ = read_struct(data, len(data) - FOOTER_END - _footer_length(data))
    groups = footer.get(ROW_GROUPS, [])
    for group in groups:
        for chunk in group[CHUNKS]:
            if COLUMN not in chunk:
                raise WireError("a column without an offset")
    return list(groups)


def _parse_page(header: Fields) -> PageHeader:
    kinds = {kind: header[kind] for kind in ENCODING if kind in header}
    return PageHeader(
        size=_unsigned_field(header, SIZE, LARGEST_I32),
        num_values=max(
            (_unsigned_field(k, NUM_VALUES, LARGEST_I32) for k in kinds.values()), default=0
        ),
        is_plain=all(kinds[kind].get(ENCODING[kind]) == PLAIN for kind in kinds),
        is_dictionary=DICTIONARY in kinds,
    )


def _unsigned_field(fields: Fields, key: int, limit: int = 1 << 62) -> int:
    """Return a non-negative integer field; raise if it is missing or exceeds its width."""
    value = fields.get(key, -1)
    if not 0 <= value < limit:
        raise WireError("an integer out of range")
    return int(value)


def _decoded_bytes(pages: Sequence[PageHeader], column: Any, as_dictionaries: bool) -> int:
    """Return the decoded size of a column in bytes."""
    size = sum(page.size for page in pages)
    values = [page for page in pages if not page.is_dictionary]
    num = sum(page.num_values for page in values)
    kind = column.physical_type
    if kind == "BYTE_ARRAY" and not as_dictionaries:  # one long text may repeat in every row
        size += sum(page.num_values * size for page in values if not page.is_plain)
    width = column.length if kind == "FIXED_LEN_BYTE_ARRAY" else WIDTH.get(kind, 8)
    return int(max(size, num * (width + LIST_ENTRY)))
