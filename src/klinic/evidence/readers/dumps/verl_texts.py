"""Reads verl's completions (`trainer.rollout_data_dir`) as records: STEP.jsonl.

A line is a completion: `input`, `output`, `score`, `step`, `gts` (the dataset's answer), and `uid`
of the prompt in newer versions. Lines with the same `uid`, else the same input, form a group.
Source: verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py:1226.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from klinic.evidence.readers.dumps.json_fields import JsonEntry, read_entries
from klinic.evidence.readers.dumps.rows import DumpRow, build_record
from klinic.evidence.readers.dumps.texts import answer_text, refuse_long_step, text_row
from klinic.evidence.readers.dumps.token_dump import CHARACTERS, TokenDump
from klinic.evidence.record import StepRecord


def open_dump(folder: Path, files: Sequence[tuple[int, Path]]) -> TokenDump:
    """Return the dump of the files of some steps."""
    return TokenDump(
        format="rollouts of verl",
        path=folder,
        read_records=lambda: _read_records(files),
        facts={"trainer": "verl", "token_ids": CHARACTERS},
        lacks="token ids, log-probs, advantages, finish reasons",
        num_files=len(files),
    )


def _read_records(files: Sequence[tuple[int, Path]]) -> Iterator[StepRecord]:
    for named_step, path in files:

        def step_of(entry: JsonEntry, named_step: int = named_step) -> int:
            return entry.step("step") if "step" in entry.values else named_step

        for step, entries in groupby(read_entries(path), key=step_of):
            rows = [_parse_row(entry) for entry in entries]
            refuse_long_step(sum(len(row.token_ids) for row in rows), str(path))
            yield build_record(step, rows)


def _parse_row(entry: JsonEntry) -> DumpRow:
    row = text_row(entry.text("input"), entry.text("output"))
    uid = entry.values.get("uid")
    row.group = uid if isinstance(uid, str) else None
    row.values["reward"] = entry.number("score")
    row.text, row.answer = entry.text("output"), answer_text(entry.values.get("gts"))
    return row
