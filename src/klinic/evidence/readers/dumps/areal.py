"""Reads the trajectories of AReaL (`rollout.dump_to_file=true`): VERSION/TASK.jsonl.

A line is a completion: `task_id` (the group), `prompt`, `completion`, `reward`, and the oldest and
newest version of the weights that sampled it. The folder is the newest version, counted from 0; its
completions are one step here.
Source: AReaL 4aef98d8d, areal/infra/workflow_executor.py:871.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from klinic.evidence.readers.dumps.json_fields import JsonEntry, read_entries
from klinic.evidence.readers.dumps.rows import DumpRow, build_record
from klinic.evidence.readers.dumps.texts import refuse_long_step, text_row
from klinic.evidence.readers.dumps.token_dump import CHARACTERS, TokenDump
from klinic.evidence.readers.trainer_state import list_folder
from klinic.evidence.record import StepRecord


def open_dump(folder: Path, versions: Sequence[tuple[int, Path]]) -> TokenDump:
    """Return the dump of the folders of some versions."""
    return TokenDump(
        format="trajectories of AReaL",
        path=folder,
        read_records=lambda: _read_records(versions),
        facts={"trainer": "areal", "token_ids": CHARACTERS},
        lacks="token ids, log-probs, advantages, finish reasons",
        num_files=len(versions),
    )


def _read_records(versions: Sequence[tuple[int, Path]]) -> Iterator[StepRecord]:
    for version, folder in versions:
        files = [path for path in list_folder(folder) if path.suffix == ".jsonl"]
        rows = [_parse_row(entry) for path in files for entry in read_entries(path)]
        refuse_long_step(sum(len(row.token_ids) for row in rows), str(folder))
        if rows:
            yield build_record(version + 1, rows)


def _parse_row(entry: JsonEntry) -> DumpRow:
    row = text_row(entry.text("prompt"), entry.text("completion"))
    row.group = str(entry.values.get("task_id"))
    row.values["reward"] = entry.number("reward")
    head, tail = entry.step("head_version"), entry.step("tail_version")
    if head == tail:
        row.tokens["weight_version"] = np.full(len(row.token_ids), head, np.int64)
    return row
