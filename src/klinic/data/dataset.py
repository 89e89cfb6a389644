"""Reads rows of a file, a dataset folder or a hub id; maps and validates them.

`name,config,split` selects a part of a dataset.
"""

import errno
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from klinic.data.parquet_rows import read_parquet
from klinic.data.text_rows import read_csv, read_json_lines, read_json_list
from klinic.errors import DataError, error_text, first_line
from klinic.recipe.function import find_function
from klinic.runtime.user_code import guard_process

Row = Mapping[str, Any]
DEFAULT_SPLIT = "train"
SAVED_DATASET_FILES = ("dataset_info.json", "dataset_dict.json")  # files that `save_to_disk` writes
READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json_list,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
FILE_KINDS = ".jsonl, .json, .csv or .parquet"
MACHINE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


def iterate_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file or a dataset with their numbers."""
    file = _local_path(path)
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        yield from _dataset_rows(path)
        return
    _refuse_missing_file(path, file)
    try:
        yield from reader(file)
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def split_dataset_path(path: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split; the split may contain commas.

    >>> split_dataset_path("owner/name,answerable,train[:100]"), split_dataset_path("folder")
    (('owner/name', 'answerable', 'train[:100]'), ('folder', None, 'train'))
    """
    name, _, rest = path.partition(",")
    config, _, split = rest.partition(",")
    return name.strip(), config.strip() or None, split.strip() or DEFAULT_SPLIT


def is_local_path(path: str) -> bool:
    """Whether a path is local: an existing folder, or a file name, present or not."""
    name = split_dataset_path(path)[0]
    mode = _file_mode(path, _local_path(name))
    is_folder = mode is not None and stat.S_ISDIR(mode)
    return is_folder or Path(path).suffix.lower() in READERS


def _local_path(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # an unknown home directory
        raise DataError(f"data.path is {path}: {first_line(error)}") from error


def _file_mode(path: str, file: Path) -> int | None:
    """Return the mode of a file; None if it does not exist."""
    try:
        return file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, symlink loop, name too long, NUL byte
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{short_repr(path)} cannot be read: {reason}.") from error


def _refuse_missing_file(path: str, file: Path) -> None:
    mode = _file_mode(path, file)
    if mode is None:
        raise DataError(f"{path}: there is no such file under {Path.cwd()}.")
    if not stat.S_ISREG(mode):  # a pipe would block, a device never ends
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise DataError(f"{path} is {kind}, not a file of rows. Name a {FILE_KINDS} file.")


def _dataset_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a folder or a hub id with the `datasets` library."""
    name, config, split = split_dataset_path(path)
    folder = _local_path(name)
    _refuse_non_dataset(path, name, folder)
    number = 0
    try:
        rows = (
            _load_saved_rows(folder, split)
            if _is_saved_dataset(folder)
            else _load_rows(folder, config, split)
        )
        for number, row in enumerate(rows, 1):
            yield number, row
    except Exception as error:  # the library's readers raise errors of any type
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in MACHINE_ERRNOS:
            raise
        raise DataError(
            f"data.path is {path}: {_failure_reason(name, config, split, number)} "
            f"({first_line(error)}). "
            f"Write name,config,split of a hub id or a folder, or a {FILE_KINDS} file."
        ) from error


def _failure_reason(name: str, config: str | None, split: str, number: int) -> str:
    if number:
        return f"the rows after row {number} of {name} cannot be read"
    return f"no dataset named {name} with configuration {config} and split {split} can be loaded"


def _refuse_non_dataset(path: str, name: str, folder: Path) -> None:
    """Refuse a path that is neither folder nor hub id, before any request to the hub."""
    mode = _file_mode(path, folder)
    if mode is not None and not stat.S_ISDIR(mode):
        raise DataError(
            f"data.path is {path}: klinic cannot read this file; it reads {FILE_KINDS}."
        )
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and mode is None:
        raise DataError(f"data.path is {path}: there is no folder {name} under {Path.cwd()}.")


def _load_rows(folder: Path, config: str | None, split: str) -> Iterator[Any]:
    from datasets import load_dataset

    if config is not None and (folder / config).is_dir():
        return iter(load_dataset(str(folder / config), split=split))
    return iter(load_dataset(str(folder), config, split=split))


def _is_saved_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED_DATASET_FILES)


def _load_saved_rows(folder: Path, split: str) -> Iterator[Any]:
    """Yield the rows of a `save_to_disk` folder, with a slice such as `train[:100]` applied."""
    from datasets import DatasetDict, ReadInstruction, load_from_disk

    dataset = load_from_disk(str(folder))
    name = split.partition("[")[0]
    rows = dataset[name] if isinstance(dataset, DatasetDict) else dataset
    (row_range,) = ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
    return iter(
        rows.select(
            range(row_range.from_ or 0, len(rows) if row_range.to is None else row_range.to)
        )
    )


def short_repr(value: Any) -> str:
    """Return the repr of a value, truncated."""
    try:
        text = repr(value)
    except Exception:  # an int of 5,000 digits, or any error of a user's class
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) < 40 else f"{text[:37]}..."


PROMPT_COLUMN = "prompt"
PYTHON_HINTS = {
    "make one with data.map": 'make one: dataset.map(lambda row: {"prompt": ...})',
    "With data.map": "With dataset.map",
}
"""Advice for rows of a recipe, and for rows that were passed as Python objects."""
ROLES_THAT_END = "system, user or tool"
MAX_NAMED_COLUMNS, MAX_NAME_LENGTH = 50, 100  # columns in a message, and characters of a name


def read_rows(path: str, *, map_with: str | None = None) -> list[Row]:
    """Return the rows of `data.path`, each with a prompt."""
    rows = iterate_rows(path)
    if map_with is None:
        return check_rows(rows, path)
    function = find_function(map_with, example="my_data.py:row")
    mapped = ((number, _map_row(row, function, f"{path}, row {number}")) for number, row in rows)
    with guard_process(f"data.map ({map_with})"):
        return check_rows(((number, row) for number, row in mapped if row is not None), path)


def rows_from_python(rows: Any, source: str) -> list[Row]:
    """Return the rows of a list, a `datasets.Dataset` or any other iterable of mappings."""
    if isinstance(rows, Mapping) or hasattr(rows, "iterrows") or not isinstance(rows, Iterable):
        raise DataError(
            f"{source} is a {type(rows).__name__}, not rows. Pass a list of mappings or a "
            "datasets.Dataset; of a DataFrame, frame.to_dict('records'); of a DatasetDict, one "
            "split."
        )
    try:
        return check_rows(_number_rows(rows, source), source)
    except DataError as error:
        message = str(error)
        for recipe_hint, python_hint in PYTHON_HINTS.items():
            message = message.replace(recipe_hint, python_hint)
        raise DataError(message) from error


def _number_rows(rows: Iterable[Any], source: str) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield number, row
    except Exception as error:  # the user's iterable may raise any error
        raise DataError(
            f"{source}, row {number + 1} cannot be read: {type(error).__name__}: "
            f"{first_line(error)}."
        ) from error


def check_rows(rows: Iterable[tuple[int, Any]], source: str) -> list[Row]:
    """Return the rows; refuse the first invalid one."""
    valid_rows = []
    for number, row in rows:
        try:
            _check_row(row)
        except DataError as error:
            raise DataError(f"{source}, row {number}{error}") from error
        valid_rows.append(row)
    if not valid_rows:
        raise DataError(f"{source} has no rows: there is nothing to train on.")
    return valid_rows


def _map_row(row: Any, function: Callable[[Any], Any], where: str) -> Any:
    """Return the result of the user's function for a row; None drops the row."""
    try:
        return function(dict(row) if isinstance(row, Mapping) else row)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise any error
        raise DataError(
            f"{where}: data.map failed on {short_repr(row)}: {type(error).__name__}: "
            f"{error_text(error)}. Return a row with a `prompt`, or None to drop the row."
        ) from error


def _check_row(row: Any) -> None:
    """Refuse an invalid row with a message that continues `source, row 3`."""
    if type(row) is not dict and not isinstance(row, Mapping):  # the type check is fast
        raise DataError(f' is {short_repr(row)}, not a mapping. Write {{"prompt": "..."}}.')
    _check_columns(row)
    if PROMPT_COLUMN not in row:
        raise DataError(_explain_missing_prompt(row))
    prompt = row[PROMPT_COLUMN]
    if isinstance(prompt, (list, tuple)):
        _check_chat(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise DataError(
            f": `prompt` is {short_repr(prompt)}. It must be text of at least one character, or "
            "a list of messages."
        )


def _check_columns(row: Mapping[Any, Any]) -> None:
    for name, value in row.items():
        if not isinstance(name, str):
            raise DataError(
                f" has a column named {short_repr(name)}, which "
                "is not text. Name columns with text."
            )
        # ASCII text, the common case, needs no check
        if not name.isascii():
            _check_unicode(name, f": the name of column {name!r}")
        if isinstance(value, str) and not value.isascii():
            _check_unicode(value, f": `{name}`")


def _explain_missing_prompt(row: Row) -> str:
    names = [str(key)[:MAX_NAME_LENGTH] for key in islice(row, MAX_NAMED_COLUMNS)]
    close = get_close_matches(PROMPT_COLUMN, names, n=1, cutoff=0.5)
    has = ", ".join(map(repr, names)) or "no columns"
    fix = "Rename the column that is the prompt, or make one with data.map."
    if close:
        fix = f"Rename {close[0]!r} to it."
    elif "messages" in row:
        fix = "With data.map, return the messages before the last answer as `prompt`."
    return f" has no `prompt` (it has {has}). {fix}"


def _check_chat(messages: Any) -> None:
    """Refuse messages that no chat template can render as a prompt."""
    if not messages:
        raise DataError(": `prompt` is a chat without messages. Write at least one.")
    for number, message in enumerate(messages, 1):
        label = f": message {number} of `prompt`"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{label} is {short_repr(message)}. A message has a `role` and a `content`: "
                '{"role": "user", "content": "..."}.'
            )
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            raise DataError(f"{label} has the content {short_repr(content)}. It must be text.")
        _check_unicode(content, label)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            ": the last message of `prompt` is the assistant's, so there is nothing to "
            f"complete. End with {ROLES_THAT_END}; put a reference answer in its own column."
        )


def _check_unicode(text: str, label: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{label} is not valid Unicode ({error.reason}).") from error
