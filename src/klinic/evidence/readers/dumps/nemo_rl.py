"""Reads NeMo-RL's training data: train_data_stepN.jsonl in its log folder, written by default.

A line is a sample, with every value in a list of length 1, padded to the longest of the batch:
`token_ids`, `input_lengths`, `token_loss_mask`, `sample_loss_mask`, `advantages` per token,
`generation_logprobs` of the sampler, `prev_logprobs` of the learner before the step, `rewards`.
Position t holds the log-prob of token t. Samples with the same prompt form a group.
Under dynamic sampling the rewards of the kept samples are `filtered_rewards`, and `rewards` those
of all samples in their own order: lines beyond the kept samples have nothing else.
Source: NeMo-RL 7ea279abf, nemo_rl/algorithms/grpo.py:1738 and 3632, nemo_rl/utils/logger.py:1071.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from klinic.evidence.readers.dumps.json_fields import JsonEntry, read_entries
from klinic.evidence.readers.dumps.rows import (
    DumpRow,
    build_record,
    constant_advantage,
    split_sequence,
)
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.record import StepRecord

COLUMNS = {
    "token_advantage": "advantages",
    "logp_sampler": "generation_logprobs",
    "logp_old": "prev_logprobs",
}


def open_dump(folder: Path, files: Sequence[tuple[int, Path]]) -> TokenDump:
    """Return the dump of the files of some steps."""
    return TokenDump(
        format="training data of NeMo-RL",
        path=folder,
        read_records=lambda: _read_records(files),
        facts={"trainer": "nemo-rl"},
        lacks="reference, entropy, finish reasons",
        num_files=len(files),
    )


def _read_records(files: Sequence[tuple[int, Path]]) -> Iterator[StepRecord]:
    for step, path in files:
        rows = [_parse_row(entry) for entry in read_entries(path) if _is_kept(entry)]
        if rows:
            facts = {"learner_version": step - 1} if step else {}
            yield build_record(step, rows, facts)


def _is_kept(entry: JsonEntry) -> bool:
    return entry.values.get("input_lengths") != []


def _parse_row(entry: JsonEntry) -> DumpRow:
    values = {name: _unwrapped(value) for name, value in entry.values.items()}
    entry = JsonEntry(values, entry.where)
    length = entry.step("input_lengths")
    ids = entry.ids("token_ids")[:length]
    mask = _mask(entry)[:length]
    columns = {
        name: None if column is None else column[:length]
        for name, column in ((n, entry.floats(key)) for n, key in COLUMNS.items())
    }
    row = split_sequence(ids, mask, columns, entry.where)
    # 0 where the sampler reported none: tokens of the environment
    row.tokens = {
        name: np.where(row.loss_mask | (column != 0), column, np.nan)
        if name == "logp_sampler"
        else column
        for name, column in row.tokens.items()
    }
    if entry.number("sample_loss_mask") == 0:
        row.loss_mask = np.zeros_like(row.loss_mask)
    constant_advantage(row)
    is_filtered = "filtered_rewards" in values
    row.values["reward"] = entry.number("filtered_rewards" if is_filtered else "rewards")
    return row


def _mask(entry: JsonEntry) -> np.ndarray:
    mask = entry.floats("token_loss_mask")
    if mask is None:
        raise entry.error("token_loss_mask", "a list of 0 and 1")
    return np.asarray(np.nan_to_num(mask) != 0)


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
