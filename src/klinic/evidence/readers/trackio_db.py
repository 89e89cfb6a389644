"""Reads trackio's database: `PROJECT.db` in its folder, by default ~/.cache/huggingface/trackio.

The table `metrics` has a row per call of `trackio.log`: `run_name`, `step`, and `metrics` as JSON.
Of several runs the one that logged last is read. The database is read into memory, and nothing of
its schema runs: `metrics` must be a plain table.
Source: trackio 0.36, trackio/sqlite_storage.py:495.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import parse_line, read_bytes
from klinic.evidence.readers.json_lines import add_entry
from klinic.evidence.readers.log import LogBuilder, ScalarLog

SUFFIX = ".db"
MAGIC = b"SQLite format 3\0"
LARGEST = 1 << 30  # bytes
WRITE_VERSION, READ_VERSION = 18, 19  # bytes of the header; 2 is a write-ahead log, 1 is none
LONGEST_ROW = 1 << 20  # bytes of a step's metrics
OPERATIONS = 100_000  # of SQLite's virtual machine between two checks of the limit
LAST_RUN = "SELECT run_name FROM metrics ORDER BY id DESC LIMIT 1"
MOST_CHECKS = 5_000


def read_log(path: Path) -> ScalarLog:
    """Return the metrics of the run in a database that logged last."""
    builder, run = LogBuilder(), None
    try:
        with _open_database(path) as database:
            run = _last_run(database, path)
            for step, text in _read_rows(database):
                entry = parse_line(text.encode(errors="replace")) if isinstance(text, str) else None
                if entry is not None:
                    add_entry(builder, {**entry, "step": step})
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # SQLite quotes damage
        raise EvidenceError(
            f"{path}: is not a database of trackio ({error}). It was damaged, or written by "
            "another program; export the run as CSV."
        ) from error
    return builder.build_log(format=f"trackio, run {run}", files=(path,))


def _open_database(path: Path) -> sqlite3.Connection:
    data = bytearray(read_bytes(path, largest=LARGEST))
    if not data.startswith(MAGIC):
        raise EvidenceError(f"{path}: is not a SQLite database. Pass the PROJECT.db of trackio.")
    # a write-ahead log is a second file, which a database in memory cannot have
    data[WRITE_VERSION] = data[READ_VERSION] = 1
    database = sqlite3.connect(":memory:")
    database.deserialize(bytes(data))
    database.text_factory = _decode_text
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_ROW)
    database.execute("PRAGMA trusted_schema=OFF")
    database.execute("PRAGMA query_only=ON")
    checks = iter(range(MOST_CHECKS))
    database.set_progress_handler(lambda: next(checks, None) is None, OPERATIONS)
    return database


def _decode_text(data: bytes) -> str:
    return data.decode(errors="replace")


def _last_run(database: sqlite3.Connection, path: Path) -> str:
    kinds = database.execute("SELECT type FROM sqlite_master WHERE name = 'metrics'").fetchall()
    if kinds != [("table",)]:
        raise EvidenceError(
            f"{path}: has no table `metrics`, so trackio did not write it. Pass the PROJECT.db of "
            "trackio, or its folder."
        )
    row = database.execute(LAST_RUN).fetchone()
    if row is None or not isinstance(row[0], str):
        raise EvidenceError(f"{path}: has no metrics. Pass the database of a run that logged some.")
    return row[0]


def _read_rows(database: sqlite3.Connection) -> Iterator[tuple[Any, Any]]:
    yield from database.execute(
        f"SELECT step, metrics FROM metrics WHERE run_name = ({LAST_RUN}) ORDER BY id"  # noqa: S608 - a constant
    )
