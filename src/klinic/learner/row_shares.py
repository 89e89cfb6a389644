"""The rows of a step that one rank computes, and their way to it: each rank receives only its own.

The division is that of `packing.py`. A share is an Arrow table with one row per completion, so
nothing is pickled.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from klinic.evidence.columns import from_table, to_table
from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS, StepRecord, select_rows
from klinic.learner.packing import deal_row_sets

SHARE_ROW, MICRO_BATCH, SHARE = "share_row", "micro_batch", "share"
NARROWED = ("token_ids", "prompt_ids", "weight_version")
"""Columns that are sent in 32 bits and received in 64."""
NO_ROW = np.full(1, -1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare:
    """The rows of one rank, in the step's order, and their micro-batches."""

    record: StepRecord
    """Its rows; a row that is not trained on if it has none."""
    rows: Int[np.ndarray, "b"]
    """Their indices among the rows of the step; empty if it has none."""
    micro_batch: Int[np.ndarray, "b"]
    """Number of the micro-batch of each row."""
    num_batches: int
    """Micro-batches that every rank runs."""
    num_step_rows: int
    """Rows of all ranks."""

    def row_sets(self) -> list[tuple[np.ndarray, bool]]:
        """Return the rows of each micro-batch among those of the share, and whether they count."""
        num_own = int(self.micro_batch.max()) + 1 if len(self.rows) else 0
        own = [(np.flatnonzero(self.micro_batch == number), True) for number in range(num_own)]
        filler = own[0][0] if own else np.zeros(1, np.int64)
        return own + [(filler, False)] * (self.num_batches - num_own)


def share_of_rank(
    record: StepRecord, row_sets: Sequence[np.ndarray], *, rank: int, num_ranks: int
) -> RowShare:
    """Return the rows of one rank; `row_sets` are the micro-batches of all."""
    dealt = deal_row_sets(row_sets, rank=rank, num_ranks=num_ranks)
    rows = np.concatenate([np.zeros(0, np.int64), *dealt.own])
    number = np.repeat(np.arange(len(dealt.own)), [len(own) for own in dealt.own])
    order = np.argsort(rows)
    rows = rows[order]
    return RowShare(
        record=_take_rows(record, rows) if len(rows) else untrained_row(record),
        rows=rows,
        micro_batch=number[order],
        num_batches=len(dealt.own) + dealt.num_fillers,
        num_step_rows=record.num_rows,
    )


def _take_rows(record: StepRecord, rows: np.ndarray) -> StepRecord:
    return record if len(rows) == record.num_rows else select_rows(record, rows.tolist())


def untrained_row(record: StepRecord) -> StepRecord:
    """Return a record with the columns of another and one row of one token, without loss."""

    def first(name: str) -> Any:
        array = getattr(record, name)
        return None if array is None else np.zeros_like(array[:1])

    columns = {name: first(name) for name in (*TOKEN_FIELDS, *ROW_FIELDS, "prompt_ids")}
    num_tokens, num_prompt = min(1, record.num_tokens), min(1, len(columns["prompt_ids"]))
    return replace(
        record,
        **columns
        | {
            "reward": np.full(1, np.nan),  # so that it is in no mean over rows
            "reward_parts": dict.fromkeys(record.reward_parts, np.full(1, np.nan)),
            "row_offsets": np.array([0, num_tokens]),
            "prompt_offsets": np.array([0, num_prompt]),
        },
    )


def encode_share(share: RowShare) -> np.ndarray:
    """Return a share as the bytes of an Arrow stream; ids take four bytes each."""
    num_rows = share.record.num_rows
    rows, number = (
        (share.rows, share.micro_batch) if len(share.rows) else (NO_ROW, np.zeros(num_rows, int))
    )
    ids: dict[str, Any] = {
        name: None if (values := getattr(share.record, name)) is None else values.astype(np.int32)
        for name in NARROWED
    }
    table = to_table(replace(share.record, **ids))
    table = table.append_column(SHARE_ROW, pa.array(rows))
    table = table.append_column(MICRO_BATCH, pa.array(number))
    counts = {"num_batches": share.num_batches, "num_step_rows": share.num_step_rows}
    head = json.dumps({"step": share.record.step, **counts})
    return encode_table(table.replace_schema_metadata({SHARE: head}))


def decode_share(data: Any) -> RowShare:
    """Return the share in an Arrow stream."""
    table = decode_table(data)
    head = json.loads(table.schema.metadata[SHARE.encode()])
    rows, number = (table[name].to_numpy() for name in (SHARE_ROW, MICRO_BATCH))
    columns = table.drop_columns([SHARE_ROW, MICRO_BATCH])
    has_rows = rows[0] >= 0
    return RowShare(
        record=from_table(columns, step=head["step"], facts={}, source="rank 0"),
        rows=rows if has_rows else rows[:0],
        micro_batch=number if has_rows else number[:0],
        num_batches=head["num_batches"],
        num_step_rows=head["num_step_rows"],
    )


def encode_table(table: Any) -> np.ndarray:
    """Return the bytes of an Arrow stream of a table, which is copied once."""
    counter = pa.MockOutputStream()
    with pa.ipc.new_stream(counter, table.schema) as stream:
        stream.write_table(table)
    data = np.empty(counter.size(), np.uint8)
    with pa.ipc.new_stream(pa.FixedSizeBufferWriter(pa.py_buffer(data)), table.schema) as stream:
        stream.write_table(table)
    return data


def decode_table(data: Any) -> Any:
    """Return the Arrow table in a stream."""
    return pa.ipc.open_stream(data).read_all()
