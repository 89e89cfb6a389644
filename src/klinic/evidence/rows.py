"""Some rows of a record, as a record."""

from dataclasses import fields, replace
from typing import Any

from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS, StepRecord


def first_rows(record: StepRecord, num: int) -> StepRecord:
    """Return the first `num` completions."""
    if num >= record.num_rows:
        return record
    tokens = int(record.row_offsets[num])
    cut: dict[str, Any] = {"row_offsets": record.row_offsets[: num + 1]}
    cut |= {name: _cut(record, name, num) for name in ROW_FIELDS}
    cut |= {name: _cut(record, name, tokens) for name in TOKEN_FIELDS}
    cut["reward_parts"] = {name: part[:num] for name, part in record.reward_parts.items()}
    if record.prompt_offsets is not None and record.prompt_ids is not None:
        cut["prompt_offsets"] = record.prompt_offsets[: num + 1]
        cut["prompt_ids"] = record.prompt_ids[: int(record.prompt_offsets[num])]
    assert cut.keys() <= {field.name for field in fields(record)}  # noqa: S101 - all are columns
    return replace(record, **cut)


def _cut(record: StepRecord, name: str, num: int) -> Any:
    array = getattr(record, name)
    return None if array is None else array[:num]
