"""Converts a record to an Arrow table with one row per completion, and back.

Token fields become list columns.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from klinic.errors import EvidenceError
from klinic.evidence.record import (
    ROW_FIELDS,
    TOKEN_FIELDS,
    EmittedBy,
    Fact,
    StepRecord,
    select_rows,
)

REWARD_PART = "reward/"
"""Prefix of the column of a reward function."""
BOOLEANS = ("loss_mask", "prompt_ids_match", "round_trip")
FLOATS = (
    "reward",
    "advantage",
    "loss_denominator",
    "logp_sampler",
    "logp",
    "logp_old",
    "logp_ref",
    "logp_teacher",
    "token_advantage",
    "entropy",
    "kl_exact",
    "routing_mismatch",
)
LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
REQUIRED = ("token_ids", "group")
STEP_ROW = "step_row"
"""Column of a row's index among those of its step, where parts do not hold consecutive rows."""
COLUMN_NAMES = frozenset({*ROW_FIELDS, *TOKEN_FIELDS, "prompt_ids", STEP_ROW})
MAX_REASON_LENGTH = 64  # characters of a finish reason


def is_known_column(name: str) -> bool:
    """Whether a column is read; other columns are never decoded."""
    return name in COLUMN_NAMES or name.startswith(REWARD_PART)


def to_table(record: StepRecord, step_rows: np.ndarray | None = None) -> Any:
    """Return the record as an Arrow table; a field that is None has no column.

    `step_rows` are the indices of its rows among those of the step, if it has some of them.
    """
    columns = {name: _array_column(getattr(record, name)) for name in ROW_FIELDS}
    for name, part in record.reward_parts.items():
        columns[REWARD_PART + name] = _array_column(part)
    columns["prompt_ids"] = _list_column(record.prompt_offsets, record.prompt_ids)
    for name in TOKEN_FIELDS:
        columns[name] = _list_column(record.row_offsets, getattr(record, name))
    columns[STEP_ROW] = _array_column(step_rows)
    return pa.table({name: column for name, column in columns.items() if column is not None})


def from_table(table: Any, *, step: int, facts: Mapping[str, Fact], source: str) -> StepRecord:
    """Return the record in an Arrow table, its rows in the order of the step.

    Unknown columns are ignored, missing ones are None.
    """
    columns = _TableColumns(table, source)
    offsets = columns.list_offsets("token_ids", None)
    if offsets is None or "group" not in columns:
        raise EvidenceError(
            f"{source}: has no column `{'token_ids' if offsets is None else 'group'}`, and every "
            "check needs it. Write it, one entry per completion."
        )
    tokens = {name: columns.token_values(name, offsets) for name in TOKEN_FIELDS}
    rows = {name: columns.row_values(name) for name in ROW_FIELDS}
    facts = dict(facts)
    if tokens["loss_mask"] is None:
        tokens["loss_mask"] = _mask_from(tokens["emitted_by"], source)
        facts["loss_mask_from"] = "emitted_by"
    prompt_offsets = columns.list_offsets("prompt_ids", None)
    record = StepRecord(
        step=step,
        row_offsets=offsets,
        prompt_offsets=prompt_offsets,
        prompt_ids=columns.token_values("prompt_ids", prompt_offsets),
        reward_parts=columns.reward_parts(),
        facts=facts,
        **tokens,
        **rows,
    )
    return _in_step_order(record, columns.row_values(STEP_ROW), source)


def _in_step_order(record: StepRecord, step_rows: Any, source: str) -> StepRecord:
    """Return the record with its rows in the order of the step."""
    if step_rows is None:
        return record
    order = np.argsort(step_rows, kind="stable")
    numbers = np.arange(record.num_rows)
    if not np.array_equal(step_rows[order], numbers):
        raise EvidenceError(
            f"{source}: column `{STEP_ROW}` must number the rows of the step from 0, each once. "
            "Write it so in all parts, or leave it out."
        )
    return record if np.array_equal(order, numbers) else select_rows(record, order.tolist())


class _TableColumns:
    """Typed access to the columns of an untrusted Arrow table."""

    def __init__(self, table: Any, source: str) -> None:
        self._source = source
        columns = table.columns
        if any(column.num_chunks != 1 for column in columns):
            columns = table.combine_chunks().columns
        # cached: a long run has tens of thousands of tables
        self._types: dict[str, Any] = {field.name: field.type for field in table.schema}
        self._columns = dict(zip(table.column_names, columns, strict=True))
        if len(self._columns) < len(columns):
            names = table.column_names
            doubles = sorted({name for name in names if names.count(name) > 1})
            raise self._column_error(doubles[0], "occurs twice", "Write it once")

    def __contains__(self, name: str) -> bool:
        # some writers encode "not recorded" as a column of nulls
        return name in self._types and not pa.types.is_null(self._types[name])

    def row_values(self, name: str) -> Any:
        """Return a field with one entry per row, or None."""
        return self._to_numpy(name, self._single_chunk(name)) if name in self else None

    def reward_parts(self) -> dict[str, Any]:
        """Return the rewards of each reward function."""
        names = [name for name in self._columns if name.startswith(REWARD_PART)]
        return {n.removeprefix(REWARD_PART): self.row_values(n) for n in names if n in self}

    def list_offsets(self, name: str, expected: Any) -> Any:
        """Return the list offsets of a column, or None; raise if they differ from `expected`."""
        if name not in self:
            return None
        kind = self._types[name]
        if not any(is_kind(kind) for is_kind in LISTS):
            raise self._column_error(
                name, f"holds {kind}, not lists", "Write one list per completion"
            )
        starts = self._list_starts(name, self._single_chunk(name))
        if expected is not None and not np.array_equal(starts, expected):
            row = int(np.argmax(np.diff(starts) != np.diff(expected)))
            raise self._column_error(
                name,
                f"has {int(np.diff(starts)[row])} entries in row {row}, but `token_ids` has "
                f"{int(np.diff(expected)[row])}",
                "Write one entry per token",
            )
        return starts

    def _list_starts(self, name: str, lists: Any) -> Any:
        """Return the start of each list of a column, and the end of the last."""
        if _is_contiguous(lists):
            starts = lists.offsets.to_numpy().astype(np.int64)
            return starts - starts[0]
        lengths = pc.list_value_length(lists).fill_null(-1).to_numpy()
        if (lengths < 0).any():
            row = int(np.argmax(lengths < 0))
            raise self._column_error(name, f"has no list in row {row}", "Write a list in every row")
        return np.cumsum([0, *lengths], dtype=np.int64)

    def token_values(self, name: str, offsets: Any) -> Any:
        """Return a field with one entry per token, or None."""
        if self.list_offsets(name, offsets) is None:
            return None
        lists = self._single_chunk(name)
        if not _is_contiguous(lists):
            return self._to_numpy(name, lists.flatten())
        ends = lists.offsets
        first, last = ends[0].as_py(), ends[-1].as_py()
        return self._to_numpy(name, lists.values.slice(first, last - first))

    def _to_numpy(self, name: str, array: Any) -> Any:
        wanted = _arrow_type(name, array.type)
        try:
            array = array if array.type.equals(wanted) else array.cast(wanted)
        except pa.ArrowException as error:
            raise self._column_error(
                name, f"cannot be read ({error})", "Write numbers of the documented type"
            ) from error
        if name == "finish_reason":
            return self._to_strings(name, array.fill_null("") if array.null_count else array)
        if array.null_count and not pa.types.is_floating(array.type):
            raise self._column_error(name, f"has {array.null_count} nulls", "Fill them")
        return array.to_numpy(zero_copy_only=False)

    def _to_strings(self, name: str, array: Any) -> Any:
        try:
            # NumPy pads every row to the longest
            short = pc.utf8_slice_codeunits(array, 0, MAX_REASON_LENGTH)
            return np.array(short.to_pylist(), np.str_)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._column_error(name, f"is not text ({error})", "Write UTF-8") from error

    def _single_chunk(self, name: str) -> Any:
        column = self._columns[name]
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)

    def _column_error(self, name: str, problem: str, advice: str) -> EvidenceError:
        instead = "" if name in REQUIRED else ", or leave the column out"
        return EvidenceError(f"{self._source}: column `{name}` {problem}. {advice}{instead}.")


def _is_contiguous(lists: Any) -> bool:
    """Whether the values of a list column are contiguous, as its offsets require."""
    return len(lists) > 0 and not lists.null_count and not pa.types.is_fixed_size_list(lists.type)


def _arrow_type(name: str, stored_type: Any) -> Any:
    if name == "finish_reason":
        return pa.string()
    if name in BOOLEANS:
        return pa.bool_()
    if name in FLOATS or name.startswith(REWARD_PART):
        return stored_type if pa.types.is_floating(stored_type) else pa.float64()
    return pa.int8() if name == "emitted_by" else pa.int64()


def _mask_from(emitted_by: Any, source: str) -> Any:
    if emitted_by is None:
        raise EvidenceError(
            f"{source}: has neither `loss_mask` nor `emitted_by`, so the trained tokens are "
            "unknown. Write one of them."
        )
    return emitted_by == EmittedBy.POLICY


def _array_column(values: Any) -> Any:
    if values is None:
        return None
    return pa.array(values.tolist(), pa.string()) if values.dtype.kind in "UO" else pa.array(values)


def _list_column(offsets: Any, values: Any) -> Any:
    if values is None:
        return None
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), pa.array(values))
