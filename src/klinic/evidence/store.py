"""Records on disk: one immutable folder per step, valid once its manifest exists.

    records/step=000123/part-00000.parquet    one row per completion, zstd
    records/step=000123/complete.json         written last: files, digests, facts of the step

Files are never changed in place, so a run can be read while it trains and killed at any time.
Processes that write parts of their own have them merged by `part_merging.py`.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from klinic.errors import EvidenceError
from klinic.evidence.columns import from_table, is_known_column, to_table
from klinic.evidence.facts import fact_from_json, fact_to_json
from klinic.evidence.files import json_bytes, read_bytes, read_json
from klinic.evidence.part_limits import (
    LARGEST_STEP,
    MOST_PARTS,
    THRIFT,
    MemoryBudget,
    check_footer,
)
from klinic.evidence.record import Fact, StepRecord, select_rows
from klinic.evidence.schema_version import SCHEMA
from klinic.evidence.writing import remove_tree, write_atomically, write_durably

ResultT = TypeVar("ResultT")
MANIFEST = "complete.json"
MANIFEST_KEYS = {"schema", "step", "parts", "facts"}
PART_NAME = re.compile(r"part-[0-9]+\.parquet")
MAX_PARTS = 4
"""Parts that one process writes of a step."""
MAX_REREADS = 3
"""Times that a step is read again because its parts were merged meanwhile."""
MAX_QUEUED = 4
"""Records that may be queued for writing before `RecordWriter.put` blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One Parquet file of a step, as listed in its manifest."""

    file: str
    rows: int
    sha256: str


def write_record(run: Path, record: StepRecord, rank: int = 0) -> None:
    """Write the record of a step, then its manifest: at most `MAX_PARTS` parts, by process."""
    parts = [write_part(run, part, number) for number, part in _parts_by_rank(record, rank)]
    complete_step(run, record.step, parts, record.facts)


def _parts_by_rank(record: StepRecord, rank: int) -> list[tuple[int, StepRecord]]:
    """Return the rows of processes in turn; all rows as one part if they are not by process."""
    process = record.process
    if process is None or not record.num_rows or process[0] < 0 or (np.diff(process) < 0).any():
        return [(rank, record)]
    if process[0] == process[-1]:
        return [(int(process[0]), record)]
    groups = np.array_split(np.unique(process), MAX_PARTS)
    return [
        (int(ranks[0]), select_rows(record, np.flatnonzero(np.isin(process, ranks)).tolist()))
        for ranks in groups
        if ranks.size
    ]


def write_part(run: Path, record: StepRecord, rank: int, rows: np.ndarray | None = None) -> Part:
    """Write the rows of one rank. The step is not valid before `complete_step`.

    `rows` are their indices among those of the step, where parts do not hold consecutive rows.
    """
    folder = step_folder(run, record.step)
    table = to_table(record, rows)
    _make_step_folder(folder)
    return write_part_table(folder / part_name(rank), table)


def write_part_table(path: Path, table: Any) -> Part:
    """Write a part from its table. It is valid once the manifest holds its digest."""
    sink = pa.BufferOutputStream()
    # Log-probs hardly repeat, so a dictionary costs time and space. No reader uses column
    # statistics or the Arrow schema.
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    data = sink.getvalue().to_pybytes()
    write_durably(path, data)
    return Part(file=path.name, rows=len(table), sha256=hashlib.sha256(data).hexdigest())


def _make_step_folder(folder: Path) -> None:
    """Create the folder of a step, but not that of its run, which may have been moved."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)


def part_name(rank: int) -> str:
    """Return the file name of a rank's part."""
    return f"part-{rank:05d}.parquet"


def complete_step(
    run: Path, step: int, parts: Sequence[Part], facts: Mapping[str, Fact] | None = None
) -> None:
    """Write the manifest of a step after all its parts: this makes the step valid."""
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "step": step,
        "parts": [asdict(part) for part in parts],
        "facts": {name: fact_to_json(value) for name, value in (facts or {}).items()},
    }
    manifest["digest"] = manifest_digest(manifest)
    write_atomically(step_folder(run, step) / MANIFEST, json_bytes(manifest) + b"\n")


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its `digest`, as JSON with sorted keys."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_record(run: Path, step: int) -> StepRecord:
    """Return the record of a complete step; raise `EvidenceError` if it is damaged or missing."""
    return _read_current_parts(run, step, lambda files: _read_listed(run, step, files))


def _read_listed(run: Path, step: int, files: "StepFiles") -> StepRecord:
    """Return the record of a step from the parts of a manifest."""
    folder = step_folder(run, step)
    budget = MemoryBudget(folder, [part.file for part in files.parts])
    tables = [read_part(folder, part, budget) for part in files.parts]
    table = concat_parts(tables, folder)
    return from_table(table, step=step, facts=files.facts, source=str(folder))


def _read_current_parts(run: Path, step: int, read: "Callable[[StepFiles], ResultT]") -> ResultT:
    """Return what `read` makes of a step's parts; again if they were merged meanwhile."""
    files = read_step_files(run, step)
    for _ in range(MAX_REREADS):
        try:
            return read(files)
        except EvidenceError:
            newer = read_step_files(run, step)
            if newer.digest == files.digest:
                raise
            files = newer
    return read(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """The manifest of a complete step."""

    digest: str
    """SHA-256 of the manifest, which holds the digests of all parts."""
    facts: Mapping[str, Fact]
    parts: tuple[Part, ...]


def read_step_files(run: Path, step: int) -> StepFiles:
    """Return the manifest of a step; raise `EvidenceError` if it is damaged."""
    path = step_folder(run, step) / MANIFEST
    manifest = _read_manifest(path, step)
    return StepFiles(
        digest=manifest_digest(manifest),
        facts={name: fact_from_json(value) for name, value in manifest["facts"].items()},
        parts=tuple(parse_parts(manifest, path)),
    )


def verify_parts(run: Path, step: int) -> None:
    """Raise `EvidenceError` if a part of a step differs from its digest in the manifest."""

    def read_bytes_of(files: StepFiles) -> None:
        for part in files.parts:
            _read_part_bytes(step_folder(run, step), part)

    _read_current_parts(run, step, read_bytes_of)


def complete_steps(run: Path) -> list[int]:
    """Return the complete steps, in order."""
    return sorted(s for s, folder in _step_folders(run).items() if (folder / MANIFEST).is_file())


def has_record(run: Path, step: int) -> bool:
    """Whether the record of a step is complete."""
    return (step_folder(run, step) / MANIFEST).is_file()


def remove_records_after(run: Path, step: int) -> None:
    """Remove records after `step` and incomplete ones; the run resumes from `step`."""
    for recorded_step, folder in _step_folders(run).items():
        if recorded_step > step or not (folder / MANIFEST).is_file():
            remove_step(folder)


def remove_step(folder: Path) -> None:
    """Remove the folder of a step, its manifest first: a kill leaves an incomplete step."""
    if not folder.is_symlink():
        (folder / MANIFEST).unlink(missing_ok=True)
    remove_tree(folder)


def record_bytes(run: Path, step: int) -> int:
    """Return the size of a step's files on disk."""
    folder = step_folder(run, step)
    names = (MANIFEST, *(part.file for part in read_step_files(run, step).parts))
    return sum((folder / name).stat().st_size for name in names)


class RecordWriter:
    """Writes records in a background thread, in order.

    A record must not be changed after `put`. A write error is raised by the next `put`, `flush` or
    `close`.
    """

    def __init__(self, run: Path, rank: int = 0) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._run, self._rank = run, rank
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-records")
        self._pending: deque[Future[None]] = deque()

    def put(self, record: StepRecord) -> None:
        """Queue a record; block while more than `MAX_QUEUED` others are queued."""
        self._await_writes(at_most=MAX_QUEUED)
        self._pending.append(self._pool.submit(write_record, self._run, record, self._rank))

    def flush(self) -> None:
        """Wait until every queued record is written."""
        self._await_writes(at_most=0)

    def close(self) -> None:
        """Wait until every record is written; raise the first error."""
        self._pool.shutdown(wait=True)
        self._await_writes(at_most=0)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_writes(self, *, at_most: int) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) > at_most):
            self._pending.popleft().result()


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step."""
    return run / "records" / f"step={step:06d}"


def _step_folders(run: Path) -> dict[int, Path]:
    folders = {}
    for folder in sorted((run / "records").glob("step=*")):
        digits = re.fullmatch(r"step=([0-9]+)", folder.name)
        if digits is None:
            continue
        step = int(digits[1])
        if folder != step_folder(run, step):
            raise EvidenceError(
                f"{folder}: steps have six digits, so no reader finds this folder. "
                f"Rename it to {step_folder(run, step).name}."
            )
        folders[step] = folder
    return folders


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    manifest = read_json(path)
    schema = manifest.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise EvidenceError(
            f"{path}: has schema {schema}, but this klinic reads up to {SCHEMA}. Update klinic."
        )
    wrong = ""
    if set(manifest) - {"digest"} != MANIFEST_KEYS:
        wrong = f"must have the keys {sorted(MANIFEST_KEYS)}, has {sorted(manifest)}"
    elif manifest.get("digest", "") not in ("", manifest_digest(manifest)):
        wrong = "does not match its `digest`"
    elif schema not in range(1, SCHEMA + 1) or manifest["step"] != step:
        wrong = f"has schema {schema}, step {manifest['step']}; expected 1 to {SCHEMA}, {step}"
    elif not isinstance(manifest["facts"], dict):
        wrong = "must have an object of names and values in `facts`"
    if wrong:
        raise EvidenceError(f"{path}: {wrong}. It was damaged or miswritten; write the step again.")
    return manifest


def parse_parts(manifest: Mapping[str, Any], path: Path) -> list[Part]:
    """Return the parts that a manifest lists."""
    entries = manifest["parts"]
    if isinstance(entries, list) and len(entries) > MOST_PARTS:
        raise EvidenceError(
            f"{path}: `parts` lists {len(entries):,} files, and a step has at most {MOST_PARTS:,}, "
            "one per rank. Write the step again."
        )
    try:
        parts = [
            Part(file=str(e["file"]), rows=int(e["rows"]), sha256=e["sha256"]) for e in entries
        ]
    except (TypeError, KeyError, ValueError, OverflowError):
        parts = []
    # bare names only: a manifest must not point outside its folder
    if not parts or not all(PART_NAME.fullmatch(part.file) for part in parts):
        raise EvidenceError(
            f"{path}: `parts` must list the step's files, each with `file` (part-00000.parquet and "
            "so on, in this folder), `rows` and `sha256`. Write the step again."
        )
    return parts


def _read_part_bytes(folder: Path, part: Part) -> bytes:
    path = folder / part.file
    try:
        data = read_bytes(path, largest=LARGEST_STEP)
    except EvidenceError as error:
        raise type(error)(f"{error} The manifest requires this file.") from error
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise EvidenceError(
            f"{path}: is not the file its manifest describes: the SHA-256 differs. It was damaged "
            "or cut short; restore it from a copy, or delete the step's folder."
        )
    return data


def read_part(folder: Path, part: Part, budget: MemoryBudget, *, known_columns: bool = True) -> Any:
    """Return the table of a part, without columns of other programs unless they are wanted."""

    def is_read(name: str) -> bool:
        return not known_columns or is_known_column(name)

    path = folder / part.file
    data = _read_part_bytes(folder, part)
    check_footer(data, path)
    try:
        parquet = pq.ParquetFile(pa.BufferReader(data), **THRIFT)
        budget.charge_columns(parquet, data, rows=part.rows, is_read=is_read)
        names = [name for name in parquet.schema_arrow.names if is_read(name)]
        # An Arrow thread that releases `data` at interpreter exit would abort the process.
        return parquet.read(names, use_threads=False)
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}") from error
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise EvidenceError(f"{path}: is not Parquet ({error}). Write the step again.") from error


def concat_parts(tables: Sequence[Any], folder: Path) -> Any:
    """Return the tables of a step's parts as one; raise `EvidenceError` if columns differ."""
    if len(tables) == 1:  # the usual case
        return tables[0]
    names = [set(table.column_names) for table in tables]
    uneven = sorted(set.union(*names) - set.intersection(*names))
    if uneven:
        raise EvidenceError(
            f"{folder}: column `{uneven[0]}` is in some parts and not in others, so some rows have "
            "no values. Write it in every part or in none (NaN where there is no value)."
        )
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise EvidenceError(f"{folder}: the parts have incompatible columns ({error}).") from error
