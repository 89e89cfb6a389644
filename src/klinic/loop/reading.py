"""Reads raw rows from a file, a dataset folder or a hub id; `name,config,split` selects a part."""

import errno
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from klinic.errors import DataError, first_line
from klinic.loop.parquet_rows import read_parquet
from klinic.loop.text_rows import read_csv, read_json_lines, read_json_list

Row = Mapping[str, Any]
SPLIT = "train"
SAVED = ("dataset_info.json", "dataset_dict.json")  # files that `save_to_disk` writes
READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json_list,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
KINDS = ".jsonl, .json, .csv or .parquet"
OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


def read(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file or a dataset with their numbers."""
    file = _local(path)
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        yield from _dataset(path)
        return
    _refuse_no_file(path, file)
    try:
        yield from reader(file)
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def parts(path: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split; the split may contain commas.

    >>> parts("owner/name,answerable,train[:100]"), parts("folder")
    (('owner/name', 'answerable', 'train[:100]'), ('folder', None, 'train'))
    """
    name, _, rest = path.partition(",")
    config, _, split = rest.partition(",")
    return name.strip(), config.strip() or None, split.strip() or SPLIT


def is_here(path: str) -> bool:
    """Whether a path is local: an existing folder, or a file name, present or not."""
    name = parts(path)[0]
    mode = _mode(path, _local(name))
    is_folder = mode is not None and stat.S_ISDIR(mode)
    return is_folder or Path(path).suffix.lower() in READERS


def _local(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # an unknown home directory
        raise DataError(f"data.path is {path}: {first_line(error)}") from error


def _mode(path: str, file: Path) -> int | None:
    """Return the mode of a file; None if it does not exist."""
    try:
        return file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, symlink loop, name too long, NUL byte
        said = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{shown(path)} cannot be read: {said}.") from error


def _refuse_no_file(path: str, file: Path) -> None:
    mode = _mode(path, file)
    if mode is None:
        raise DataError(f"{path}: there is no such file under {Path.cwd()}.")
    if not stat.S_ISREG(mode):  # a pipe would block, a device never ends
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise DataError(f"{path} is {kind}, not a file of rows. Name a {KINDS} file.")


def _dataset(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a folder or a hub id with the `datasets` library."""
    name, config, split = parts(path)
    folder = _local(name)
    _refuse_no_dataset(path, name, folder)
    number = 0
    try:
        rows = _saved(folder, split) if _is_saved(folder) else _loaded(folder, config, split)
        for number, row in enumerate(rows, 1):
            yield number, row
    except Exception as error:  # the library's readers raise errors of any type
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in OF_THE_MACHINE:
            raise
        raise DataError(
            f"data.path is {path}: {_reason(name, config, split, number)} ({first_line(error)}). "
            f"Write name,config,split of a hub id or a folder, or a {KINDS} file."
        ) from error


def _reason(name: str, config: str | None, split: str, number: int) -> str:
    if number:
        return f"the rows after row {number} of {name} cannot be read"
    return f"no dataset named {name} with configuration {config} and split {split} can be loaded"


def _refuse_no_dataset(path: str, name: str, folder: Path) -> None:
    """Refuse a path that is neither folder nor hub id, before any request to the hub."""
    mode = _mode(path, folder)
    if mode is not None and not stat.S_ISDIR(mode):
        raise DataError(f"data.path is {path}: klinic cannot read this file; it reads {KINDS}.")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and mode is None:
        raise DataError(f"data.path is {path}: there is no folder {name} under {Path.cwd()}.")


def _loaded(folder: Path, config: str | None, split: str) -> Iterator[Any]:
    from datasets import load_dataset

    if config is not None and (folder / config).is_dir():
        return iter(load_dataset(str(folder / config), split=split))
    return iter(load_dataset(str(folder), config, split=split))


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _saved(folder: Path, split: str) -> Iterator[Any]:
    """Yield the rows of a `save_to_disk` folder, with a slice such as `train[:100]` applied."""
    from datasets import DatasetDict, ReadInstruction, load_from_disk

    found = load_from_disk(str(folder))
    name = split.partition("[")[0]
    rows = found[name] if isinstance(found, DatasetDict) else found
    (taken,) = ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
    return iter(rows.select(range(taken.from_ or 0, len(rows) if taken.to is None else taken.to)))


def shown(value: Any) -> str:
    """Return the repr of a value, truncated."""
    try:
        text = repr(value)
    except Exception:  # an int of 5,000 digits, or any error of a user's class
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) < 40 else f"{text[:37]}..."
