"""Tokens of completions for the token view of a page, with every recorded log-prob.

A page holds a bounded number of tokens. Each of its steps has an equal part of them, which goes to
the completions with the largest gaps first, of different prompts if possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from klinic.evidence.record import StepRecord
from klinic.report.logp_gaps import logp_gap
from klinic.report.short_number import zero_rounding
from klinic.report.token_heatmap import MAX_TOKEN_CHARS, token_text

MAX_PAGE_TOKENS = 120_000  # tokens of one run on a page
MAX_ROW_TOKENS = 8_192  # tokens of one completion
MAX_PROMPT_TOKENS = 160  # last tokens of a prompt
MAX_PAGE_ROWS = 6_000  # completions of one run on a page
MILLI = 1_000  # log-probs are stored in thousandths of a nat
MAX_MILLI = 10**9
LOGP_FIELDS = {
    "logp": "logp",
    "old": "logp_old",
    "sampler": "logp_sampler",
    "ref": "logp_ref",
    "entropy": "entropy",
    "tokenAdvantage": "token_advantage",
}
"""Columns of the token view, and the fields of a record that they show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """One completion of the token view."""

    row: int
    prompt: str
    facts: Mapping[str, float | int | str | None]
    """Reward, advantage, group, process, finish reason; None if not recorded."""
    length: int
    """Tokens of the completion, of which the first are shown."""
    ids: Int[np.ndarray, "T"]
    trained: Int[np.ndarray, "T"]
    columns: Mapping[str, list[int | None] | None]
    """Thousandths of a nat by column; None for a column that was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The completions of one step that a page holds."""

    step: int
    num_rows: int
    """Completions of the step, also those that are left out."""
    rows: list[RowTokens]


def step_tokens(
    record: StepRecord,
    texts: Mapping[int, str],
    *,
    num_tokens: int,
    num_rows: int,
    first: Sequence[int] = (),
) -> StepTokens:
    """Return at most so many tokens and completions of a step.

    The rows in `first` come before all others, which are in the order of their gaps.
    """
    rows: list[RowTokens] = []
    left = num_tokens
    order = dict.fromkeys((*first, *_order_rows(record)))
    for row in list(order)[:num_rows]:
        if left <= 0:
            break
        rows.append(_row_tokens(record, row, texts, min(left, MAX_ROW_TOKENS)))
        left -= len(rows[-1].ids)
    return StepTokens(step=record.step, num_rows=record.num_rows, rows=rows)


def used_texts(steps: Sequence[StepTokens], texts: Mapping[int, str]) -> dict[int, str]:
    """Return the shortened text of every token that some steps show."""
    ids = {int(i) for step in steps for row in step.rows for i in np.unique(row.ids)}
    return {i: token_text(i, texts) for i in sorted(ids)}


def prompt_text(record: StepRecord, row: int, texts: Mapping[int, str]) -> str:
    """Return the end of a row's prompt; empty if prompts were not recorded."""
    if record.prompt_ids is None or record.prompt_offsets is None:
        return ""
    ids = record.prompt_ids[record.prompt_offsets[row] : record.prompt_offsets[row + 1]]
    text = "".join(token_text(int(i), texts) for i in ids[-MAX_PROMPT_TOKENS:])
    return text[: MAX_PROMPT_TOKENS * MAX_TOKEN_CHARS]


def finish_reason(record: StepRecord, row: int) -> str | None:
    """Return why a completion ended; None if that was not recorded."""
    return None if record.finish_reason is None else str(record.finish_reason[row])[:20]


def _order_rows(record: StepRecord) -> list[int]:
    """Return all rows: the largest gap first, and first one of each prompt."""
    size = np.zeros(record.num_tokens)
    for lane in ("sampler", "reference"):
        gaps = logp_gap(record, lane)
        size += 0.0 if gaps is None else np.nan_to_num(np.abs(gaps))
    means = _row_means(record, size)
    order = np.argsort(-means, kind="stable").tolist()
    first_of: dict[int, int] = {}
    for row in order:
        first_of.setdefault(int(record.group[row]), row)
    first = set(first_of.values())
    return [row for row in order if row in first] + [row for row in order if row not in first]


def _row_means(record: StepRecord, values: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    lengths = np.maximum(np.diff(record.row_offsets), 1)
    means: np.ndarray = np.diff(sums[record.row_offsets]) / lengths
    return means


def _row_tokens(
    record: StepRecord, row: int, texts: Mapping[int, str], num_tokens: int
) -> RowTokens:
    start, end = int(record.row_offsets[row]), int(record.row_offsets[row + 1])
    part = slice(start, min(end, start + num_tokens))
    return RowTokens(
        row=row,
        prompt=prompt_text(record, row, texts),
        facts={
            "reward": _row_value(record.reward, row),
            "advantage": _row_value(record.advantage, row),
            "group": int(record.group[row]),
            "process": None if record.process is None else int(record.process[row]),
            "finish": finish_reason(record, row),
        },
        length=end - start,
        ids=record.token_ids[part],
        trained=record.loss_mask[part].astype(np.int64),
        columns={name: _milli(getattr(record, f), part) for name, f in LOGP_FIELDS.items()},
    )


def _row_value(values: np.ndarray | None, row: int) -> float | None:
    if values is None or not np.isfinite(values[row]):
        return None
    return float(f"{zero_rounding(float(values[row])):.5g}")


def _milli(values: Any, part: slice) -> list[int | None] | None:
    """Return values in thousandths as integers; None for those that are not finite."""
    if values is None:
        return None
    some = np.asarray(values[part], np.float64)
    finite = np.isfinite(some)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.clip(np.where(finite, some, 0.0) * MILLI, -MAX_MILLI, MAX_MILLI)
    whole = scaled.round().astype(np.int64).tolist()
    if finite.all():
        return list(whole)
    return [value if ok else None for value, ok in zip(whole, finite.tolist(), strict=True)]
