"""Reads rows from a Parquet file, a batch at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.errors import DataError, first_line

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 4_096  # rows


def read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows; refuse values that Python cannot represent by row and column."""
    number = 0
    for batch in _record_batches(file):
        yield from enumerate(_batch_rows(batch, file, number), number + 1)
        number += batch.num_rows


def _record_batches(file: Path) -> "Iterator[pa.RecordBatch]":
    from pyarrow import parquet

    try:
        source = parquet.ParquetFile(file)
        _refuse_duplicate_columns(source.schema_arrow.names, file)
        # Arrow threads can abort an exiting process, as in `evidence.store`
        yield from source.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
    except DataError:
        raise
    except Exception as error:  # on a damaged file Arrow raises errors of any kind
        raise DataError(
            f"{file} is not a readable Parquet file: {first_line(error)}. Write it again."
        ) from error


def _refuse_duplicate_columns(names: list[str], file: Path) -> None:
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise DataError(
            f"{file}: has the column {duplicates[0]!r} twice, "
            "and a row can hold one of them. Rename "
            "or remove the other."
        )


def _batch_rows(batch: "pa.RecordBatch", file: Path, num_rows_before: int) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except Exception as error:  # a date out of Python's range, invalid UTF-8, and others
        raise DataError(_explain_unreadable_value(batch, file, num_rows_before, error)) from error
    return rows


def _explain_unreadable_value(
    batch: "pa.RecordBatch", file: Path, num_rows_before: int, error: Exception
) -> str:
    for number in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column[number].as_py()
            except Exception as value_error:  # of any type: only its position matters
                return (
                    f"{file}, row {num_rows_before + number + 1}, "
                    f"column {name!r}: Python has no value for "
                    f"this {column.type} ({first_line(value_error)}). "
                    "Store it as text or leave the "
                    "column out."
                )
    return f"{file} is not a readable Parquet file: {first_line(error)}. Write it again."
