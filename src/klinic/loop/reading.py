"""Where rows are: a file, a folder of a dataset, or a hub; `name,config,split` says which part."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from klinic.errors import DataError

Row = Mapping[str, Any]
SPLIT = "train"
SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves


def read(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file or a dataset, each with its number."""
    file = Path(path).expanduser()
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        yield from enumerate(_dataset(path), 1)
        return
    if not file.is_file():
        raise DataError(f"{path}: there is no such file under {Path.cwd()}.")
    yield from reader(file)


def parts(path: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split; the split may hold commas of its own.

    >>> parts("owner/name,answerable,train[:100]"), parts("folder")
    (('owner/name', 'answerable', 'train[:100]'), ('folder', None, 'train'))
    """
    name, _, rest = path.partition(",")
    config, _, split = rest.partition(",")
    return name.strip(), config.strip() or None, split.strip() or SPLIT


def _dataset(path: str) -> Iterator[Any]:
    """Yield the rows of a folder or of a hub id, through the `datasets` library."""
    name, config, split = parts(path)
    folder = Path(name).expanduser()
    _refuse_missing(path, name, folder)
    try:
        yield from _saved(folder, split) if _is_saved(folder) else _loaded(folder, config, split)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data.path is {path}: no dataset named {name} with configuration {config} and split "
            f"{split} can be loaded ({first}). Write name,config,split of a hub id or a folder, or "
            "a .jsonl, .json, .csv or .parquet file."
        ) from error


def _refuse_missing(path: str, name: str, folder: Path) -> None:
    """Refuse a folder that does not exist, before a hub is asked for it."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not folder.is_dir():
        raise DataError(f"data.path is {path}: there is no folder {name} under {Path.cwd()}.")


def _loaded(folder: Path, config: str | None, split: str) -> Iterator[Any]:
    from datasets import load_dataset

    if config is not None and (folder / config).is_dir():
        return iter(load_dataset(str(folder / config), split=split))
    return iter(load_dataset(str(folder), config, split=split))


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _saved(folder: Path, split: str) -> Iterator[Any]:
    """Yield what `save_to_disk` wrote; a slice such as `train[:100]` is taken here."""
    from datasets import DatasetDict, ReadInstruction, load_from_disk

    found = load_from_disk(str(folder))
    name = split.partition("[")[0]
    rows = found[name] if isinstance(found, DatasetDict) else found
    (taken,) = ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
    return iter(rows.select(range(taken.from_ or 0, len(rows) if taken.to is None else taken.to)))


def shown(value: Any) -> str:
    """Return a value, short."""
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."


def _jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            yield number, _parsed(line, f"{file}, line {number}")


def _json(file: Path) -> Iterator[tuple[int, Any]]:
    rows = _parsed("".join(_lines(file)), str(file))
    if not isinstance(rows, list):
        raise DataError(f"{file} is {shown(rows)}, not a list of rows. Write one, or use .jsonl.")
    yield from enumerate(rows, 1)


def _csv(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(csv.DictReader(_lines(file), strict=True), 1)
    except csv.Error as error:
        raise DataError(f"{file} is not a CSV file: {error}.") from error


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # threads of Arrow's can abort a process that ends, as in `evidence.store`
        yield from enumerate(parquet.ParquetFile(file).read(use_threads=False).to_pylist(), 1)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}.") from error


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8."
        ) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}. Write one object a row.") from error


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
