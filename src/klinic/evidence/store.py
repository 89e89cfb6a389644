"""Records on disk: one immutable folder a step, which counts once its manifest is there.

    records/step=000123/part-00000.parquet    one row a completion, zstd
    records/step=000123/complete.json         written last: files, digests, facts of the step

Nothing is ever changed in place, so a run can be read while it goes on and killed at any time.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from klinic.errors import EvidenceError
from klinic.evidence.columns import from_table, is_read, to_table
from klinic.evidence.facts import fact_from_json, fact_to_json
from klinic.evidence.files import json_bytes, read_bytes, read_json
from klinic.evidence.part_limits import (
    LARGEST_STEP,
    MOST_PARTS,
    THRIFT,
    MemoryBudget,
    check_footer,
)
from klinic.evidence.record import SCHEMA, Fact, StepRecord
from klinic.evidence.writing import remove_tree, write_atomically, write_durably

MANIFEST = "complete.json"
MANIFEST_KEYS = {"schema", "step", "parts", "facts"}
WAITING = 4
"""Records that may wait for the disk before training waits for it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a step, as its manifest names it."""

    file: str
    rows: int
    sha256: str


def write_record(run: Path, record: StepRecord, rank: int = 0) -> None:
    """Write the whole record of a step as one part, and its manifest."""
    complete_step(run, record.step, [write_part(run, record, rank)], record.facts)


def write_part(run: Path, record: StepRecord, rank: int) -> Part:
    """Write the rows that one rank holds. The step does not count before `complete_step`."""
    sink = pa.BufferOutputStream()
    # Log-probs hardly repeat: a dictionary of them takes time, and more room than they do. Least
    # and largest values, and Arrow's word for a type beside Parquet's own, are read by nobody.
    pq.write_table(
        to_table(record),
        sink,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    data = sink.getvalue().to_pybytes()
    folder = step_folder(run, record.step)
    _make(folder)
    name = part_name(rank)
    write_durably(folder / name, data)  # it counts when the manifest does, which names its hash
    return Part(file=name, rows=record.num_rows, sha256=hashlib.sha256(data).hexdigest())


def _make(folder: Path) -> None:
    """Make the folder of a step, but not that of its run: it may have been moved or deleted."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)


def part_name(rank: int) -> str:
    """Return the name of one rank's file."""
    return f"part-{rank:05d}.parquet"


def complete_step(
    run: Path, step: int, parts: Sequence[Part], facts: Mapping[str, Fact] | None = None
) -> None:
    """Write the manifest of a step whose parts are all written: from now on the step counts."""
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
    """Return the record of a complete step; what is damaged or missing is an `EvidenceError`."""
    folder = step_folder(run, step)
    manifest = _read_manifest(folder / MANIFEST, step)
    parts = _parts_of(manifest, folder / MANIFEST)
    budget = MemoryBudget(folder, [part.file for part in parts])
    tables = [_read_part(folder, part, budget) for part in parts]
    facts = {name: fact_from_json(value) for name, value in manifest["facts"].items()}
    return from_table(_join(tables, folder), step=step, facts=facts, source=str(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """The files of a complete step, before any of them but the manifest is read."""

    digest: str
    """SHA-256 of the manifest, which names those of all parts."""
    facts: Mapping[str, Fact]
    parts: tuple[Part, ...]


def read_step_files(run: Path, step: int) -> StepFiles:
    """Return what the manifest of a step says; one that is damaged is an `EvidenceError`."""
    path = step_folder(run, step) / MANIFEST
    manifest = _read_manifest(path, step)
    return StepFiles(
        digest=manifest_digest(manifest),
        facts={name: fact_from_json(value) for name, value in manifest["facts"].items()},
        parts=tuple(_parts_of(manifest, path)),
    )


def verify_parts(run: Path, step: int, parts: Sequence[Part]) -> None:
    """Read the parts of a step; one that is not what its manifest names is an `EvidenceError`."""
    for part in parts:
        _part_bytes(step_folder(run, step), part)


def steps(run: Path) -> list[int]:
    """Return the complete steps, in order."""
    return sorted(s for s, folder in _folders(run).items() if (folder / MANIFEST).is_file())


def has_record(run: Path, step: int) -> bool:
    """Whether the record of a step is complete."""
    return (step_folder(run, step) / MANIFEST).is_file()


def forget_after(run: Path, step: int) -> None:
    """Remove the records of later steps and incomplete ones: the run goes on from `step`."""
    for found, folder in _folders(run).items():
        if found > step or not (folder / MANIFEST).is_file():
            # first, so that an interrupted removal leaves a step that does not count
            if not folder.is_symlink():
                (folder / MANIFEST).unlink(missing_ok=True)
            remove_tree(folder)


class RecordWriter:
    """Writes records behind the training step's back, in the order they were put.

    A record must not be changed once it was put. What goes wrong is raised by the next `put`, or
    by `close`.
    """

    def __init__(self, run: Path, rank: int = 0) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._run, self._rank = run, rank
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-records")
        self._pending: deque[Future[None]] = deque()

    def put(self, record: StepRecord) -> None:
        """Hand over a record. Returns at once unless `WAITING` others wait already."""
        self._settle(at_most=WAITING)
        self._pending.append(self._pool.submit(write_record, self._run, record, self._rank))

    def flush(self) -> None:
        """Wait until every record that was put is written."""
        self._settle(at_most=0)

    def close(self) -> None:
        """Wait until every record is written; raise the first thing that went wrong."""
        self._pool.shutdown(wait=True)
        self._settle(at_most=0)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, *, at_most: int) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) > at_most):
            self._pending.popleft().result()


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step."""
    return run / "records" / f"step={step:06d}"


def _folders(run: Path) -> dict[int, Path]:
    found = {}
    for folder in sorted((run / "records").glob("step=*")):
        digits = re.fullmatch(r"step=([0-9]+)", folder.name)
        if digits is None:
            continue
        step = int(digits[1])
        if folder != step_folder(run, step):
            raise EvidenceError(
                f"{folder}: steps have six digits, so nobody would find this one. "
                f"Rename it to {step_folder(run, step).name}."
            )
        found[step] = folder
    return found


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
        wrong = "does not have the digest it names"
    elif schema != SCHEMA or manifest["step"] != step:
        wrong = f"says schema {schema}, step {manifest['step']}; this is {SCHEMA}, {step}"
    elif not isinstance(manifest["facts"], dict):
        wrong = "must have an object of names and values in `facts`"
    if wrong:
        raise EvidenceError(f"{path}: {wrong}. It was damaged or miswritten; write the step again.")
    return manifest


def _parts_of(manifest: Mapping[str, Any], path: Path) -> list[Part]:
    entries = manifest["parts"]
    if isinstance(entries, list) and len(entries) > MOST_PARTS:
        raise EvidenceError(
            f"{path}: `parts` lists {len(entries):,} files, and a step has at most {MOST_PARTS:,}, "
            "one a rank. Write the step again."
        )
    try:
        parts = [
            Part(file=str(e["file"]), rows=int(e["rows"]), sha256=e["sha256"]) for e in entries
        ]
    except (TypeError, KeyError, ValueError, OverflowError):
        parts = []
    # a bare name: a manifest must not lead out of its folder
    if not parts or not all(re.fullmatch(r"part-[0-9]+\.parquet", part.file) for part in parts):
        raise EvidenceError(
            f"{path}: `parts` must list the step's files, each with `file` (part-00000.parquet and "
            "so on, in this folder), `rows` and `sha256`. Write the step again."
        )
    return parts


def _part_bytes(folder: Path, part: Part) -> bytes:
    path = folder / part.file
    try:
        data = read_bytes(path, largest=LARGEST_STEP)
    except EvidenceError as error:
        raise type(error)(f"{error} It cannot be used, but the manifest names it.") from error
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise EvidenceError(
            f"{path}: is not the file its manifest describes: the SHA-256 differs. It was damaged "
            "or cut short; restore it from a copy, or delete the step's folder."
        )
    return data


def _read_part(folder: Path, part: Part, budget: MemoryBudget) -> Any:
    path = folder / part.file
    data = _part_bytes(folder, part)
    check_footer(data, path)
    try:
        parquet = pq.ParquetFile(pa.BufferReader(data), **THRIFT)
        budget.admit(parquet, data, rows=part.rows, is_read=is_read)
        names = [name for name in parquet.schema_arrow.names if is_read(name)]
        # A thread of Arrow's that lets go of `data` while Python ends would abort the process.
        return parquet.read(names, use_threads=False)
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}") from error
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise EvidenceError(f"{path}: is not Parquet ({error}). Write the step again.") from error


def _join(tables: Sequence[Any], folder: Path) -> Any:
    if len(tables) == 1:  # as in most runs, with thousands of steps
        return tables[0]
    names = [set(table.column_names) for table in tables]
    uneven = sorted(set.union(*names) - set.intersection(*names))
    if uneven:
        raise EvidenceError(
            f"{folder}: column `{uneven[0]}` is in some parts and not in others, so its rows have "
            "no values. Write it in every part or in none (NaN where there is no value)."
        )
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise EvidenceError(f"{folder}: the parts do not fit together ({error}).") from error
