"""Rows to train on: read from files or a hub, checked one by one, and dealt out by step."""

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from klinic.errors import ConfigError, DataError
from klinic.evidence.rollout import Prompt

Row = Mapping[str, Any]
PROMPT = "prompt"
ORDER = 0x0DA7A  # keeps the order of the rows apart from the streams that completions use


def read_rows(path: str, *, split: str) -> list[Row]:
    """Return the rows of a .jsonl, .json, .csv or .parquet file, or of a dataset on a hub."""
    file = Path(path).expanduser()
    reader = READERS.get(file.suffix.lower())
    if reader is not None:
        if not file.is_file():
            raise DataError(f"data.path is {path}: there is no such file under {Path.cwd()}.")
        return checked(reader(file), path)
    return checked(enumerate(_from_hub(path, split), 1), path)


def checked(rows: Iterable[tuple[int, Any]], source: str) -> list[Row]:
    """Return the rows, refusing the first that cannot be a prompt."""
    found = []
    for number, row in rows:
        _check(row, f"{source}, row {number}")
        found.append(row)
    if not found:
        raise DataError(f"{source} has no rows: there is nothing to train on.")
    return found


def _check(row: Any, where: str) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f'{where} is {_shown(row)}, not a mapping. Write {{"prompt": "..."}}.')
    strange = [key for key in row if not isinstance(key, str)]
    if strange:
        raise DataError(
            f"{where} has a column named {strange[0]!r}, which is no text: in a CSV file, a row "
            "with more fields than the header. Mend the row."
        )
    if PROMPT not in row:
        close = get_close_matches(PROMPT, [str(key) for key in row], n=1, cutoff=0.5)
        has = ", ".join(repr(str(key)) for key in row) or "no columns"
        mend = f"Rename {close[0]!r} to it." if close else "Rename the column that is the prompt."
        raise DataError(f"{where} has no `prompt` (it has {has}). {mend}")
    prompt = row[PROMPT]
    if isinstance(prompt, list):
        raise DataError(
            f"{where}: `prompt` is a list, as of chat messages. klinic takes text: apply the "
            "model's chat template first (tokenizer.apply_chat_template(..., tokenize=False))."
        )
    if not isinstance(prompt, str) or not prompt:
        raise DataError(
            f"{where}: `prompt` is {_shown(prompt)}. It must be text of at least one character."
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: `prompt` is not valid Unicode ({error.reason}).") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."


def _jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            yield number, _parsed(line, f"{file}, line {number}")


def _json(file: Path) -> Iterator[tuple[int, Any]]:
    rows = _parsed("".join(_lines(file)), str(file))
    if not isinstance(rows, list):
        raise DataError(f"{file} is {_shown(rows)}, not a list of rows. Write one, or use .jsonl.")
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
        yield from enumerate(parquet.read_table(file).to_pylist(), 1)
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


def _from_hub(path: str, split: str) -> Iterator[Any]:
    from datasets import load_dataset

    name, _, config = path.partition(",")
    try:
        yield from load_dataset(name, config or None, split=split)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data.path is {path}: neither a .jsonl, .json, .csv or .parquet file nor a dataset "
            f"that can be loaded ({first})."
        ) from error


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


class Prompts:
    """The rows in a shuffled order that is a function of seed and step: nothing to save."""

    def __init__(
        self, rows: Sequence[Row], *, encode: Callable[[str], list[int]], per_step: int, seed: int
    ) -> None:
        if per_step > len(rows):
            raise ConfigError(
                f"loop.prompts_per_step is {per_step}, but there are {len(rows)} rows: a prompt "
                f"would be in a step twice. Use {len(rows)} or fewer."
            )
        self._rows = rows
        self._encode = encode
        self._per_step = per_step
        self._seed = seed

    def at(self, step: int) -> list[Prompt]:
        """Return the prompts of a step, counted from 1. The remainder of an epoch is left out."""
        epoch, place = divmod(step - 1, len(self._rows) // self._per_step)
        stream = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((self._seed, ORDER, epoch)))
        )
        order = stream.permutation(len(self._rows))
        chosen = order[place * self._per_step : (place + 1) * self._per_step]
        return [self.prompt(int(index)) for index in chosen]

    def prompt(self, index: int) -> Prompt:
        """Return one row as a prompt."""
        return make_prompt(self._rows[index], index, self._encode)

    def refuse_long(self, *, window: int | None, max_new_tokens: int) -> None:
        """Refuse rows that would not fit the model, before the first step."""
        if window is None:
            return
        for index in range(len(self._rows)):
            longest = len(self.prompt(index).token_ids) + max_new_tokens
            if longest > window:
                raise DataError(
                    f"row {index + 1}: its prompt and completions of sampling.max_new_tokens = "
                    f"{max_new_tokens} come to {longest} tokens, and the model takes {window}. "
                    "Shorten the prompt or the limit, or leave the row out."
                )

    def digest(self) -> str:
        """Return a hash of all rows, by which a resumed run knows them again."""
        total = hashlib.sha256()
        for row in self._rows:
            total.update(json.dumps(dict(row), sort_keys=True, default=_canonical).encode())
        return total.hexdigest()


def _canonical(value: Any) -> Any:
    """Return something that JSON can hold, the same in every process."""
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


def make_prompt(row: Row, index: int, encode: Callable[[str], list[int]]) -> Prompt:
    """Return a row as a prompt with its token ids."""
    token_ids = np.array(encode(row[PROMPT]), dtype=np.int64)
    if not len(token_ids):
        raise DataError(f"row {index}: `prompt` is {_shown(row[PROMPT])}, which has no tokens.")
    columns = {key: value for key, value in row.items() if key != PROMPT}
    return Prompt(index=index, text=row[PROMPT], token_ids=token_ids, columns=columns)
