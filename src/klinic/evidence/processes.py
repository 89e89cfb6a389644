"""Joins the rows of several training processes to one record.

Each process sends its rows as an Arrow table with its facts; rank 0 joins them. Nothing is pickled.
All processes must make the same calls in the same order.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from klinic.errors import ConfigError, KlinicError
from klinic.evidence.columns import from_table, to_table
from klinic.evidence.facts import fact_from_json, fact_to_json
from klinic.evidence.record import Fact, StepRecord, select_rows

COUNTED_FACTS = (
    *("num_moved_rows", "num_changed_rows", "num_reencoded_rows", "generation_rows"),
    *("num_micro_batches", "num_empty_micro_batches"),
    *("answer_prompts", "answer_paid_more", "answer_paid_less"),
)
"""Facts that count rows, prompts or batches of a process: those of a step are their sum."""
HEAD = b"klinic"  # key of the schema metadata that holds step, facts and other values


@runtime_checkable
class Processes(Protocol):
    """The processes of a training run, seen from one of them."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every process by rank on rank 0; an empty list on the others."""

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of rank 0 on every process."""


class SingleProcess:
    """A training run of one process."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of the only process."""
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        """Return the data unchanged."""
        return data


SINGLE_PROCESS = SingleProcess()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRows:
    """The rows that one process trained in a step, with its facts."""

    record: StepRecord
    values: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON values of the process, such as results of probes."""


def all_gather_json(processes: Processes, value: Any) -> list[Any]:
    """Return the JSON values of all processes, by rank, on every process."""
    if processes.size == 1:
        return [value]
    gathered = [json.loads(data) for data in processes.gather(json.dumps(value).encode())]
    values: list[Any] = json.loads(processes.broadcast(json.dumps(gathered).encode()))
    return values


def broadcast_json(processes: Processes, value: Any) -> Any:
    """Return the JSON value of rank 0 on every process."""
    if processes.size == 1:
        return value
    return json.loads(processes.broadcast(json.dumps(value).encode()))


def call_on_rank_0(processes: Processes, call: Callable[[], str]) -> str:
    """Return on every process what `call` returns on rank 0; every process raises its error."""
    if processes.size == 1:
        return call()
    result, message = "", ""
    if processes.rank == 0:
        try:
            result = call()
        except KlinicError as error:
            message = str(error)
    result, message = map(str, broadcast_json(processes, [result, message]))
    if message:
        raise ConfigError(message)
    return result


def gather_rows(processes: Processes, rows: ProcessRows) -> list[ProcessRows]:
    """Return the rows of every process on rank 0; an empty list on the others."""
    if processes.size == 1:
        return [rows]
    return [_decode_rows(data) for data in processes.gather(_encode_rows(rows))]


def join_records(records: Sequence[StepRecord]) -> StepRecord:
    """Return the rows of all processes as one record, by rank, with groups numbered from 0.

    A group keeps its number over the processes, so the groups of the records must be global. A
    column that a process lacks is dropped, unless a value exists that means "unknown".
    """
    if len(records) == 1:
        return replace(records[0], group=_number_groups(records[0].group))
    tables = [_fill_columns(to_table(record), records) for record in records]
    common = [n for n in tables[0].column_names if all(n in t.column_names for t in tables)]
    joined = pa.concat_tables([t.select(common) for t in tables], promote_options="permissive")
    facts = merge_facts([record.facts for record in records])
    record = from_table(joined, step=records[0].step, facts=facts, source="joined processes")
    ranks = np.repeat(np.arange(len(records)), [record.num_rows for record in records])
    return replace(record, process=ranks, group=_number_groups(record.group))


def _number_groups(group: np.ndarray) -> np.ndarray:
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def merge_facts(facts: Sequence[Mapping[str, Fact]]) -> dict[str, Fact]:
    """Return the facts of a step from those of its processes.

    Counts are added, other numbers averaged. Fingerprints that differ are joined to one that no
    process has, so that it is different from every other fingerprint.

    >>> merge_facts([{"loss": 1.0, "num_moved_rows": 1}, {"loss": 3.0, "num_moved_rows": 0}])
    {'loss': 2.0, 'num_moved_rows': 1}
    """
    names = dict.fromkeys(name for part in facts for name in part)
    return {name: _merge_fact(name, [part.get(name) for part in facts]) for name in names}


def split_by_process(record: StepRecord) -> dict[int, StepRecord]:
    """Return the rows of each process as a record, without the facts that count rows."""
    if record.process is None:
        return {}
    facts = {name: v for name, v in record.facts.items() if name not in COUNTED_FACTS}
    process = np.asarray(record.process)
    return {
        int(rank): replace(
            select_rows(record, np.flatnonzero(process == rank).tolist()), facts=facts
        )
        for rank in np.unique(process)
    }


def _merge_fact(name: str, values: Sequence[Fact]) -> Fact:
    known = [value for value in values if value is not None]
    if not known or (name in COUNTED_FACTS and len(known) < len(values)):
        return None
    if name in COUNTED_FACTS:
        return sum(known)  # type: ignore[arg-type]
    different = list(dict.fromkeys(known))
    if len(different) == 1:
        return different[0]
    if any(isinstance(value, str) for value in known):
        return ",".join(map(str, different))
    return float(np.mean(np.array(known, np.float64)))


def _fill_columns(table: Any, records: Sequence[StepRecord]) -> Any:
    """Add the columns that only other processes have, with the value for "unknown"."""
    if "logp_sampler" not in table.column_names and _has_any(records, "logp_sampler"):
        tokens = table.column("token_ids").combine_chunks()
        unknown = pa.array(np.full(len(tokens.flatten()), np.nan, np.float32))
        lists = pa.LargeListArray.from_arrays(tokens.offsets, unknown)
        table = table.append_column("logp_sampler", lists)
    if "round_trip" not in table.column_names and _has_any(records, "round_trip"):
        # recorded without a test only where some ids were replaced: here none were
        table = table.append_column("round_trip", pa.array(np.ones(len(table), np.bool_)))
    return table


def _has_any(records: Sequence[StepRecord], name: str) -> bool:
    return any(getattr(record, name) is not None for record in records)


def _encode_rows(rows: ProcessRows) -> bytes:
    table, sink = to_table(rows.record), pa.BufferOutputStream()
    head = {
        "step": rows.record.step,
        "facts": {name: fact_to_json(value) for name, value in rows.record.facts.items()},
        "values": rows.values,
    }
    table = table.replace_schema_metadata({HEAD: json.dumps(head).encode()})
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _decode_rows(data: bytes) -> ProcessRows:
    table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    head = json.loads(table.schema.metadata[HEAD])
    facts = {name: fact_from_json(value) for name, value in head["facts"].items()}
    record = from_table(table, step=head["step"], facts=facts, source="rows of a process")
    return ProcessRows(record=record, values=head["values"])
