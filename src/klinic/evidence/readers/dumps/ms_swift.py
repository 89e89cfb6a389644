"""Reads the completions of ms-swift (`--log_completions true`): completions.jsonl.

A line is the table of a step by column: `step`, `prompt`, `completion`, a column per reward
function, `advantages`, and `entropy` if it is logged.
Source: ms-swift 3602360a5, swift/rlhf_trainers/grpo_trainer.py:1877.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.final_answers import ANSWER_COLUMNS
from klinic.evidence.readers.dumps.find import MS_SWIFT_LONGEST
from klinic.evidence.readers.dumps.json_fields import JsonEntry, read_entries
from klinic.evidence.readers.dumps.rows import DumpRow, build_record
from klinic.evidence.readers.dumps.texts import (
    answer_text,
    refuse_long_step,
    text_of,
    text_row,
)
from klinic.evidence.readers.dumps.token_dump import CHARACTERS, TokenDump
from klinic.evidence.readers.log import parse_number
from klinic.evidence.record import StepRecord

OWN_COLUMNS = ("step", "prompt", "completion", "advantages", "entropy", *ANSWER_COLUMNS)


def open_dump(path: Path) -> TokenDump:
    """Return the dump of a run."""
    return TokenDump(
        format="completions of ms-swift",
        path=path,
        read_records=lambda: _read_records(path),
        facts={"trainer": "ms-swift", "token_ids": CHARACTERS},
        lacks="token ids, log-probs, finish reasons",
    )


def _read_records(path: Path) -> Iterator[StepRecord]:
    for entry in read_entries(path, longest=MS_SWIFT_LONGEST):
        rows = _parse_table(entry)
        if rows:
            yield build_record(_step(entry), rows)


def _step(entry: JsonEntry) -> int:
    steps = entry.items("step")
    return JsonEntry({"step": steps[0]}, entry.where).step("step")


def _parse_table(entry: JsonEntry) -> list[DumpRow]:
    prompts = [text_of(value) for value in entry.items("prompt")]
    completions = [text_of(value) for value in entry.items("completion")]
    advantages = entry.items("advantages")
    if not len(prompts) == len(completions) == len(advantages) == len(entry.items("step")):
        raise EvidenceError(
            f"{entry.where}: `step`, `prompt`, `completion` and `advantages` have {len(prompts)}, "
            f"{len(completions)} and {len(advantages)} entries; they must be equally many. Delete "
            "the line."
        )
    refuse_long_step(sum(map(len, prompts)) + sum(map(len, completions)), entry.where)
    rewards = _reward_columns(entry, len(prompts))
    answers = _answer_column(entry, len(prompts))
    rows = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = text_row(prompt, completion)
        row.parts = {name: column[index] for name, column in rewards.items()}
        advantage = parse_number(advantages[index])
        if advantage is not None:
            row.values["advantage"] = advantage
        if row.parts:
            row.values["reward"] = sum(row.parts.values())
        row.text, row.answer = completion, answer_text(answers[index])
        rows.append(row)
    return rows


def _answer_column(entry: JsonEntry, num_rows: int) -> list[Any]:
    """Return the answers of the dataset; empty ones if there is no such column."""
    columns = (entry.values.get(name) for name in ANSWER_COLUMNS)
    return next((c for c in columns if isinstance(c, list) and len(c) == num_rows), [""] * num_rows)


def _reward_columns(entry: JsonEntry, num_rows: int) -> dict[str, list[float]]:
    """Return the columns of numbers, one per reward function."""
    columns = {}
    for name, values in entry.values.items():
        if name in OWN_COLUMNS or not isinstance(values, list) or len(values) != num_rows:
            continue
        numbers = [parse_number(value) for value in values if not isinstance(value, str)]
        if len(numbers) == num_rows and None not in numbers:
            columns[name] = [float(number) for number in numbers if number is not None]
    return columns
