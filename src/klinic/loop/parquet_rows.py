"""Reads rows from a Parquet file, a batch at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.errors import DataError, first_line

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 4_096  # rows


def read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows; refuse values that Python cannot represent by row and column."""
    number = 0
    for batch in _batches(file):
        yield from enumerate(_rows(batch, file, number), number + 1)
        number += batch.num_rows


def _batches(file: Path) -> "Iterator[pa.RecordBatch]":
    from pyarrow import parquet

    try:
        source = parquet.ParquetFile(file)
        _refuse_twice(source.schema_arrow.names, file)
        # Arrow threads can abort an exiting process, as in `evidence.store`
        yield from source.iter_batches(batch_size=BATCH, use_threads=False)
    except DataError:
        raise
    except Exception as error:  # on a damaged file Arrow raises errors of any kind
        raise DataError(
            f"{file} is not a readable Parquet file: {first_line(error)}. Write it again."
        ) from error


def _refuse_twice(names: list[str], file: Path) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(
            f"{file}: has the column {twice[0]!r} twice, and a row can hold one of them. Rename "
            "or remove the other."
        )


def _rows(batch: "pa.RecordBatch", file: Path, before: int) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except Exception as error:  # a date out of Python's range, invalid UTF-8, and others
        raise DataError(_find_fault(batch, file, before, error)) from error
    return rows


def _find_fault(batch: "pa.RecordBatch", file: Path, before: int, error: Exception) -> str:
    for number in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column[number].as_py()
            except Exception as fault:  # of any type: only its position matters
                return (
                    f"{file}, row {before + number + 1}, column {name!r}: Python has no value for "
                    f"this {column.type} ({first_line(fault)}). Store it as text or leave the "
                    "column out."
                )
    return f"{file} is not a readable Parquet file: {first_line(error)}. Write it again."
