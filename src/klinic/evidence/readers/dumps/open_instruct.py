"""Reads the traces of open-instruct (`--save_traces true`): RUN_rollouts_NNNNNN.jsonl.

A line is a completion: `step`, `prompt_idx` (the group within the step), `prompt_tokens`,
`response_tokens`, `reward`, `advantage`, `finish_reason`, and `logprobs` of the sampler.
Source: open-instruct e6c3044aa, open_instruct/rl_utils.py:88.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from klinic.evidence.readers.dumps.json_fields import JsonEntry, read_entries
from klinic.evidence.readers.dumps.rows import FINISH_REASONS, DumpRow, build_record
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.record import StepRecord


def open_dump(files: Sequence[Path]) -> TokenDump:
    """Return the dump of the shards of a run."""
    return TokenDump(
        format="traces of open-instruct",
        path=files[0].parent,
        read_records=lambda: _read_records(files),
        facts={"trainer": "open-instruct"},
        lacks="learner, reference, entropy, loss mask",
        num_files=len(files),
    )


def _read_records(files: Sequence[Path]) -> Iterator[StepRecord]:
    entries = (entry for path in files for entry in read_entries(path))
    for step, lines in groupby(entries, key=lambda entry: entry.step("step")):
        yield build_record(step, _group_rows([_parse_row(entry) for entry in lines]))


def _group_rows(rows: list[DumpRow]) -> list[DumpRow]:
    """Return the rows, grouped by their prompts if one `prompt_idx` has two prompts.

    open-instruct numbers groups by the position in the batch.
    """
    prompts: dict[object, bytes] = {}
    for row in rows:
        if prompts.setdefault(row.group, row.prompt_ids.tobytes()) != row.prompt_ids.tobytes():
            for other in rows:
                other.group = None
            break
    return rows


def _parse_row(entry: JsonEntry) -> DumpRow:
    ids, logp = entry.ids("response_tokens"), entry.floats("logprobs")
    if logp is not None and len(logp) != len(ids):
        raise entry.error("logprobs", f"a list of {len(ids)} numbers, one per token")
    reason = entry.text("finish_reason")
    return DumpRow(
        prompt_ids=entry.ids("prompt_tokens"),
        token_ids=ids,
        loss_mask=np.ones(len(ids), np.bool_),
        group=entry.step("prompt_idx"),
        tokens={} if logp is None else {"logp_sampler": logp},
        values={"reward": entry.number("reward"), "advantage": entry.number("advantage")},
        finish_reason=reason if reason in FINISH_REASONS else "",
    )
