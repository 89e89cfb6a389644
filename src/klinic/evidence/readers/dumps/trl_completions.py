"""Reads TRL's completions (`log_completions=True`): completions_NNNNN.parquet in `completions`.

A row is a completion: `step`, `prompt` and `completion` (texts or chats), a column of numbers per
reward function, `advantage`, and columns of texts that reward functions add. The reward is the sum
of the reward functions: their weights are not in the file.
Source: TRL 1.16.0, trl/trainer/grpo_trainer.py:3336.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from klinic.errors import EvidenceError
from klinic.evidence.files import read_bytes
from klinic.evidence.final_answers import ANSWER_COLUMNS
from klinic.evidence.part_limits import LARGEST_STEP, THRIFT, MemoryBudget, check_footer
from klinic.evidence.readers.dumps.rows import DumpRow, build_record
from klinic.evidence.readers.dumps.texts import (
    answer_text,
    refuse_long_step,
    text_of,
    text_row,
)
from klinic.evidence.readers.dumps.token_dump import CHARACTERS, TokenDump
from klinic.evidence.record import StepRecord

REQUIRED = ("prompt", "completion", "advantage")
OWN_COLUMNS = ("step", *REQUIRED)
MOST_COLUMNS = 256


def open_dump(folder: Path, files: Sequence[tuple[int, Path]]) -> TokenDump:
    """Return the dump of the files of some steps."""
    return TokenDump(
        format="completions of TRL",
        path=folder,
        read_records=lambda: (_read_record(step, path) for step, path in files),
        facts={"trainer": "trl", "token_ids": CHARACTERS},
        lacks="token ids, log-probs, finish reasons",
        num_files=len(files),
    )


def _read_record(step: int, path: Path) -> StepRecord:
    table = _read_table(path)
    rewards = [name for name in table.column_names if _is_reward(name, table.schema.field(name))]
    columns = table["prompt"], table["completion"]
    refuse_long_step(sum(_text_bytes(column) for column in columns), str(path))
    prompts, completions = (_texts(column) for column in columns)
    advantages = _numbers(table["advantage"])
    parts = {name: _numbers(table[name]) for name in rewards}
    answers = _answers(table)
    rows: list[DumpRow] = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = text_row(prompt, completion)
        row.values["advantage"] = float(advantages[index])
        row.parts = {name: float(column[index]) for name, column in parts.items()}
        if row.parts:
            row.values["reward"] = _total_reward(list(row.parts.values()))
        row.text, row.answer = completion, answers[index]
        rows.append(row)
    return build_record(step, rows)


def _answers(table: Any) -> list[str]:
    """Return the answers of the dataset; empty ones if there is no such column."""
    name = next((name for name in ANSWER_COLUMNS if name in table.column_names), None)
    if name is None:
        return [""] * table.num_rows
    return [answer_text(value) for value in table[name].to_pylist()]


def _total_reward(parts: Sequence[float]) -> float:
    """Return the sum, as TRL's `nansum`; NaN if no function gave a reward."""
    finite = [part for part in parts if part == part]  # noqa: PLR0124 - NaN differs from itself
    return sum(finite) if finite else float("nan")


def _read_table(path: Path) -> Any:
    data = read_bytes(path, largest=LARGEST_STEP)
    check_footer(data, path)
    try:
        parquet = pq.ParquetFile(pa.BufferReader(data), **THRIFT)
        names = parquet.schema_arrow.names
        _check_columns(names, path)
        budget = MemoryBudget(path.parent, [path.name])
        rows = parquet.metadata.num_rows
        # texts stay dictionaries, so that one that repeats in every row is stored once
        budget.charge_columns(
            parquet, data, rows=rows, is_read=lambda _: True, as_dictionaries=True
        )
        texts = [column for column in _leaf_paths(parquet) if not column.startswith("step")]
        with_dictionaries = pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts, **THRIFT)
        # An Arrow thread that releases `data` at interpreter exit would abort the process.
        table = with_dictionaries.read(use_threads=False)
        table.validate(full=True)  # texts that are not UTF-8, before they become Python's
        return table
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}".replace(f"{path}: {path}", str(path))) from error
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise EvidenceError(
            f"{path}: is not Parquet ({error}). It was cut short; delete the file."
        ) from error


def _text_bytes(column: Any) -> int:
    """Return the size of the texts in a column once those that repeat are expanded."""
    if isinstance(column, pa.ChunkedArray):
        return sum(_text_bytes(chunk) for chunk in column.chunks)
    if pa.types.is_dictionary(column.type):
        lengths = pc.binary_length(column.dictionary)
        return int(pc.sum(lengths.take(column.indices)).as_py() or 0)
    if pa.types.is_struct(column.type):
        return sum(_text_bytes(part) for part in column.flatten())
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _text_bytes(column.flatten())
    return int(column.nbytes)


def _check_columns(names: Sequence[str], path: Path) -> None:
    missing = [name for name in REQUIRED if name not in names]
    if missing or len(names) > MOST_COLUMNS or len(set(names)) < len(names):
        raise EvidenceError(
            f"{path}: has no column `{missing[0] if missing else ''}`, or too many columns, so it "
            "is not a table of completions. Pass the folder that TRL wrote."
        )


def _leaf_paths(parquet: Any) -> list[str]:
    schema = parquet.metadata.schema
    columns = (schema.column(index) for index in range(len(schema)))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _is_reward(name: str, field: Any) -> bool:
    is_number = pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    return name not in (*OWN_COLUMNS, *ANSWER_COLUMNS) and is_number


def _texts(column: Any) -> list[str]:
    return ["" if value is None else text_of(value) for value in column.to_pylist()]


def _numbers(column: Any) -> np.ndarray:
    return np.array(
        [np.nan if value is None else float(value) for value in column.to_pylist()], np.float64
    )
