"""Reads rows from text files: JSON lines, a JSON list, CSV.

Only LF, CR LF and CR end a line: U+2028, U+0085, form feeds and the like are characters of a value.
Text is UTF-8, with or without a byte order mark.
"""

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from klinic.errors import DataError, first_line

MAX_LINE_CHARACTERS = 1 << 26  # characters of a line: a sparse file may read as endless zeros
CHUNK_SIZE = 1 << 20
UNSUPPORTED_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield one row per line with its line number; blank lines are skipped."""
    for number, line in enumerate(_read_lines(file, newline=None), 1):
        if not line.isspace():
            yield number, _parse_json(line, file, number)


def read_json_list(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file that is one JSON list."""
    chunks: list[str] = []
    with _open_text(file, newline="") as stream:
        for chunk in iter(partial(stream.read, CHUNK_SIZE), ""):
            if "\0" in chunk:  # a sparse file may read as endless zeros
                _refuse_nul(chunk, f"{file}, after {len(chunks)} MB")
            chunks.append(chunk)
    text = "".join(chunks)
    rows = _parse_json(text, file)
    if not isinstance(rows, list):
        kind = type(rows).__name__
        raise DataError(f"{file} is one JSON {kind}, not a list of rows. Write one, or use .jsonl.")
    yield from enumerate(rows, 1)


def read_csv(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows below the header; each must have as many fields as the header."""
    reader = csv.reader(_read_lines(file, newline=""), strict=True)
    try:
        with _allow_long_fields():
            filled = (fields for fields in reader if fields)  # a blank line has no fields
            header = next(filled, [])
            _refuse_duplicate_columns(header, file)
            for number, fields in enumerate(filled, 1):
                if len(fields) != len(header):
                    where = f"{file}, row {number} (line {reader.line_num})"
                    raise DataError(f"{where} {_explain_ragged_row(fields, header)}")
                yield number, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{file} is not a CSV file: {error}, line {reader.line_num}.") from error


@contextmanager
def _open_text(file: Path, newline: str | None) -> Iterator[TextIO]:
    """Open a file as UTF-8; skip a UTF-8 byte order mark, refuse any other."""
    with file.open("rb", buffering=CHUNK_SIZE) as raw:
        first_bytes = raw.read(4)
        if first_bytes.startswith(UNSUPPORTED_BOMS):
            raise DataError(
                f"{file} is not UTF-8: it begins with the mark of UTF-16 or UTF-32. Save it as "
                "UTF-8."
            )
        raw.seek(len(codecs.BOM_UTF8) if first_bytes.startswith(codecs.BOM_UTF8) else 0)
        try:
            with io.TextIOWrapper(raw, encoding="utf-8", newline=newline) as stream:
                yield stream
        except UnicodeDecodeError as error:
            raise DataError(_explain_invalid_utf8(file)) from error


def _read_lines(file: Path, newline: str | None) -> Iterator[str]:
    with _open_text(file, newline) as stream:
        for number, line in enumerate(iter(partial(stream.readline, MAX_LINE_CHARACTERS), ""), 1):
            if "\0" in line:
                _refuse_nul(line, f"{file}, line {number}")
            if len(line) == MAX_LINE_CHARACTERS:
                raise DataError(
                    f"{file} has a line longer than {MAX_LINE_CHARACTERS:,} "
                    "characters, so it is not a file of "
                    f"rows. It begins with {line[:40]!r}. Check the path."
                )
            yield line


def _refuse_nul(text: str, where: str) -> None:
    raise DataError(
        f"{where}, character {text.index(chr(0)) + 1} is a zero byte, which text does not have. "
        "Was it saved as UTF-16, or cut short by a full disk? Save it as UTF-8."
    )


def _explain_invalid_utf8(file: Path) -> str:
    """Return the position of the first invalid UTF-8 byte."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return (
                    f"{file}, line {number} is not UTF-8 (byte {error.start + 1} of the line: "
                    f"{error.reason}). Save it as UTF-8."
                )
    return f"{file} is not UTF-8. Save it as UTF-8."


@contextmanager
def _allow_long_fields() -> Iterator[None]:
    """Raise the CSV field limit from 131,072 characters to that of a line."""
    before = csv.field_size_limit(MAX_LINE_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _refuse_duplicate_columns(header: list[str], file: Path) -> None:
    duplicates = [name for name in header if header.count(name) > 1]
    if duplicates:
        raise DataError(
            f"{file}: the header has the column {duplicates[0]!r} twice, and a row can hold one of "
            "them. Rename or remove the other."
        )


def _explain_ragged_row(fields: list[str], header: list[str]) -> str:
    if len(fields) < len(header):
        return (
            f"has no field for the column {header[len(fields)]!r}: {len(fields)} fields, and the "
            f"header has {len(header)}. Write every field, an empty one where there is no value."
        )
    return (
        f"has {len(fields)} fields and the header {len(header)}, so the fields after the column "
        f"{header[-1]!r} have no name. Put fields with commas in quotes."
    )


@dataclass(frozen=True, slots=True)
class _BadValue:
    """Placeholder for a JSON value that cannot be read."""

    reason: str


class _DuplicateKeyError(ValueError):
    """A JSON object has a duplicate key."""


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise _DuplicateKeyError
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_duplicate_keys)


def _parse_json(text: str, file: Path, line: int | None = None) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        where = f"{file}" if line is None else f"{file}, line {line}"
        raise DataError(f"{where}{_explain_not_json(text, error)}") from error


def _explain_not_json(text: str, error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f" is not JSON: {error}. Write one object a row."
    if isinstance(error, RecursionError):
        return " is not JSON of rows: it is nested too deep."
    try:  # a duplicate key or a huge integer; a worse error may follow it
        marked = json.loads(text, object_pairs_hook=_parse_object, parse_int=_parse_int)
    except (ValueError, RecursionError) as worse:
        return f" is not JSON: {first_line(worse)}. Write one object a row."
    return _explain_bad_value(marked)


def _explain_bad_value(value: Any) -> str:
    """Return row, column and reason of a value that `_DECODER` refuses."""
    rows = enumerate(value, 1) if isinstance(value, list) else [(None, value)]
    for number, row in rows:
        columns = row.items() if isinstance(row, dict) else [(None, row)]
        for column, cell in columns:
            fault = _first_bad_value(cell)
            if fault is not None:
                row_label = "" if number is None else f", row {number}"
                return f"{row_label}{'' if column is None else f', column {column!r}'}: {fault}."
    return ": a value cannot be read."


def _first_bad_value(value: Any) -> str | None:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, _BadValue):
            return value.reason
        pending += value.values() if isinstance(value, dict) else ()
        pending += value if isinstance(value, list) else ()
    return None


def _parse_int(digits: str) -> Any:
    max_digits = sys.get_int_max_str_digits()
    if not max_digits or len(digits.lstrip("-")) <= max_digits:
        return int(digits)
    return _BadValue(
        f"a whole number has {len(digits):,} digits, and Python "
        f"reads at most {max_digits:,}. Write it "
        "as text, in quotes"
    )


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in pairs:
        row[name] = _BadValue(f"the key {name!r} occurs twice. Keep one") if name in row else value
    return row
