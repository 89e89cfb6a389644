"""One completion of a dump, and the record of the completions of a step."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.regraded import regrade_rows
from klinic.evidence.record import Fact, StepRecord
from klinic.evidence.rollout import concatenate_arrays, offsets_from_lengths

INTEGERS = ("emitted_by", "weight_version")
FINISH_REASONS = ("stop", "length")


@dataclass(slots=True, kw_only=True)
class DumpRow:
    """One completion with its prompt."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray
    group: Hashable = None
    """Rows of a step with equal values form a group; None groups by the prompt."""
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    """Token fields of a record by name."""
    values: dict[str, float] = field(default_factory=dict)
    """Row fields of a record by name."""
    parts: dict[str, float] = field(default_factory=dict)
    """Rewards by function."""
    finish_reason: str = ""
    text: str = ""
    """The completion, if the dump has its prompt's answer."""
    answer: str = ""
    """The answer of the dataset."""


def split_sequence(
    ids: np.ndarray, mask: np.ndarray, columns: Mapping[str, np.ndarray | None], where: str
) -> DumpRow:
    """Return the row of a sequence whose prompt ends at the first trained token.

    A sequence without a trained token has no prompt. `columns` cover the whole sequence.
    """
    present = {name: column for name, column in columns.items() if column is not None}
    lengths = {name: len(column) for name, column in present.items() if len(column) != len(ids)}
    if lengths or len(mask) != len(ids):
        raise EvidenceError(
            f"{where}: a sequence has {len(ids)} tokens, its mask {len(mask)} and its columns "
            f"{lengths}; they must be equally long. It was cut short or edited; restore it from a "
            "copy, or delete the line."
        )
    start = int(np.argmax(mask)) if mask.any() else 0
    return DumpRow(
        prompt_ids=ids[:start],
        token_ids=ids[start:],
        loss_mask=mask[start:].astype(np.bool_),
        tokens={name: column[start:] for name, column in present.items()},
    )


def constant_advantage(row: DumpRow) -> None:
    """Set the advantage of a row whose trained tokens all have the same one."""
    column = row.tokens.get("token_advantage")
    trained = np.zeros(0) if column is None else column[row.loss_mask]
    if trained.size and np.ptp(trained) == 0:
        row.values["advantage"] = float(trained[0])


def build_record(
    step: int, rows: Sequence[DumpRow], facts: Mapping[str, Fact] | None = None
) -> StepRecord:
    """Return the record of a step. A field that only some rows have is NaN in the others."""
    columns = {name: _token_column(rows, name) for name in _names(row.tokens for row in rows)}
    values = {name: _row_column(rows, name) for name in _names(row.values for row in rows)}
    if values.get("advantage") is not None and np.isfinite(values["advantage"]).all():
        columns.pop("token_advantage", None)
    elif columns.get("token_advantage") is not None:
        values.pop("advantage", None)
    reasons = np.array([row.finish_reason for row in rows])
    group = _group_column(rows)
    return StepRecord(
        step=step,
        group=group,
        row_offsets=offsets_from_lengths([len(row.token_ids) for row in rows]),
        prompt_offsets=offsets_from_lengths([len(row.prompt_ids) for row in rows]),
        prompt_ids=concatenate_arrays((row.prompt_ids for row in rows), np.int64),
        token_ids=concatenate_arrays((row.token_ids for row in rows), np.int64),
        loss_mask=concatenate_arrays((row.loss_mask for row in rows), np.bool_),
        finish_reason=reasons if np.isin(reasons, FINISH_REASONS).any() else None,
        reward_parts={
            name: np.array([row.parts.get(name, np.nan) for row in rows])
            for name in _names(row.parts for row in rows)
        },
        facts={**_regraded_facts(rows, group), **(facts or {})},
        **{name: column for name, column in (columns | values).items() if column is not None},
    )


def _regraded_facts(rows: Sequence[DumpRow], group: np.ndarray) -> dict[str, int]:
    if not any(row.answer for row in rows):
        return {}
    names = _names(row.parts for row in rows)
    columns = [[row.parts.get(name, np.nan) for row in rows] for name in names]
    if len(names) != 1:
        columns.append([row.values.get("reward", np.nan) for row in rows])
    rewards = np.array(columns, np.float64).T
    texts, answers = [row.text for row in rows], [row.answer for row in rows]
    return regrade_rows(texts, answers, rewards, group)


def _names(mappings: Any) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _token_column(rows: Sequence[DumpRow], name: str) -> np.ndarray | None:
    if name in INTEGERS:
        columns = [row.tokens.get(name) for row in rows]
        present = [column for column in columns if column is not None]
        return concatenate_arrays(present, np.int64) if len(present) == len(rows) else None
    return concatenate_arrays(
        (row.tokens.get(name, np.full(len(row.token_ids), np.nan)) for row in rows), np.float64
    )


def _row_column(rows: Sequence[DumpRow], name: str) -> np.ndarray:
    return np.array([row.values.get(name, np.nan) for row in rows], np.float64)


def _group_column(rows: Sequence[DumpRow]) -> np.ndarray:
    keys = [row.prompt_ids.tobytes() if row.group is None else row.group for row in rows]
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return np.array([number[key] for key in keys], np.int64)
