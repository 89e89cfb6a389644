"""Reads prime-rl's token export, with the rewards and token sources of its traces.

The export has log-probs of sampler and learner; `rollouts/step_N/train/effective/traces.jsonl`
has rewards, groups and roles. Rows are joined by their token ids; a step whose traces were not
written has none of these.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from klinic.evidence.readers import prime_rl
from klinic.evidence.readers.dumps import verifiers
from klinic.evidence.readers.dumps.rows import DumpRow
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.record import StepRecord

NOTE = "reference, finish reasons"
ASYNCHRONOUS = {"max_version_lag": 1}  # by design; the export has no versions of the weights


def open_dump(folder: Path, traces: dict[int, Path]) -> TokenDump:
    """Return the dump of an export, with the traces of each step."""
    return TokenDump(
        format="token export of prime-rl",
        path=folder,
        read_records=lambda: _read_records(folder, traces),
        facts={"trainer": "prime-rl", "sampler": ASYNCHRONOUS, **prime_rl.RUN_FACTS},
        lacks=NOTE if traces else f"rewards, {NOTE}",
    )


def _read_records(folder: Path, traces: dict[int, Path]) -> Iterator[StepRecord]:
    for record in prime_rl.read_records(folder):
        path = traces.get(record.step)
        yield record if path is None else join_traces(record, verifiers.read_rows(path))


def join_traces(record: StepRecord, rows: list[DumpRow]) -> StepRecord:
    """Return the record with the rewards, groups and token sources of the rows with its ids."""
    by_ids = {np.concatenate([row.prompt_ids, row.token_ids]).tobytes(): row for row in rows}
    joined = [by_ids.get(ids.tobytes()) for ids in _sequences(record)]
    matched = [row for row in joined if row is not None]
    if not matched:
        return record
    reward = np.array([np.nan if r is None else r.values.get("reward", np.nan) for r in joined])
    changes: dict[str, object] = {"reward": reward}
    if len(matched) == record.num_rows:
        keys = {key: n for n, key in enumerate(dict.fromkeys(row.group for row in matched))}
        sources = [row.tokens["emitted_by"] for row in matched]
        lengths = np.diff(record.row_offsets).tolist()
        if None not in keys:
            changes["group"] = np.array([keys[row.group] for row in matched], np.int64)
        if [len(source) for source in sources] == lengths:
            changes["emitted_by"] = np.concatenate(sources)
    return replace(record, **changes)  # type: ignore[arg-type]


def _sequences(record: StepRecord) -> Iterator[np.ndarray]:
    """Yield prompt and completion of each row."""
    assert record.prompt_ids is not None  # noqa: S101 - the reader sets it
    assert record.prompt_offsets is not None  # noqa: S101 - likewise
    prompts, rows = record.prompt_offsets.tolist(), record.row_offsets.tolist()
    for index in range(record.num_rows):
        prompt = record.prompt_ids[prompts[index] : prompts[index + 1]]
        yield np.concatenate([prompt, record.token_ids[rows[index] : rows[index + 1]]])
