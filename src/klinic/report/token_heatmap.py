"""Token heat map: signed KL of every token in selected completions, and the largest contributors.

The colour of a token is k1, logp_old - logp_ref: positive if the policy assigns it a higher
log-prob than the reference. Its contribution to the KL is its k3, which is never negative.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.report.logp_gaps import logp_gap, token_k3

NUM_COMPLETIONS = 4  # completions per step, of different prompts if possible
MAX_TOKENS = 160  # tokens shown per completion
MAX_TOKEN_CHARS = 24  # characters shown per token
MAX_CONTRIBUTORS = 12
SAMPLER_GAP_LIMIT = 0.1  # nats between learner and sampler from which a token is highlighted


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of the heat map; None for values that were not recorded."""

    text: str
    kl: float | None
    """k1 against the reference."""
    sampler: float | None
    """Learner minus sampler."""
    logp: float | None
    logp_sampler: float | None
    logp_ref: float | None
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion with its tokens."""

    row: int
    prompt: str
    reward: float | None
    tokens: list[Token]
    num_hidden: int
    """Tokens after the last one shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLContributor:
    """A token that contributes a large part of a step's KL."""

    text: str
    row: int
    position: int
    share: float
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapStep:
    """One step of the heat map."""

    step: int
    completions: list[Completion]
    owners: list[KLContributor]
    num_owners: int
    """The smallest number of tokens that make up half of the step's KL."""
    num_tokens: int


def heatmap_step(record: StepRecord, texts: Mapping[int, str]) -> HeatmapStep:
    """Return the heat map of a step."""
    owners, num = _top_contributors(record, texts)
    return HeatmapStep(
        step=record.step,
        completions=[_make_completion(record, row, texts) for row in _select_rows(record)],
        owners=owners,
        num_owners=num,
        num_tokens=int(record.loss_mask.sum()),
    )


def token_text(token_id: int, texts: Mapping[int, str]) -> str:
    """Return a token's text, shortened; its id if the text is unknown.

    >>> token_text(7, {7: "a" * 30}), token_text(8, {})
    ('aaaaaaaaaaaaaaaaaaaaaaa\u2026', '#8')
    """
    text = texts.get(token_id, f"#{token_id}")
    return text if len(text) <= MAX_TOKEN_CHARS else text[: MAX_TOKEN_CHARS - 1] + "\u2026"


def _select_rows(record: StepRecord) -> list[int]:
    """Return the rows to show: largest gap to the reference, distinct prompts first."""
    size = _row_sizes(record)
    order = sorted(range(record.num_rows), key=lambda row: -size[row])
    largest_of: dict[int, int] = {}
    for row in order:
        largest_of.setdefault(int(record.group[row]), row)
    first = list(largest_of.values())
    chosen = set(first)
    rest = [row for row in order if row not in chosen]
    return sorted((first + rest)[:NUM_COMPLETIONS])


def _row_sizes(record: StepRecord) -> np.ndarray:
    kl = logp_gap(record, "reference")
    sizes = np.zeros(record.num_tokens) if kl is None else np.nan_to_num(np.abs(kl))
    sums = np.concatenate([[0.0], np.cumsum(sizes)])
    return np.diff(sums[record.row_offsets])


def _make_completion(record: StepRecord, row: int, texts: Mapping[int, str]) -> Completion:
    start, end = int(record.row_offsets[row]), int(record.row_offsets[row + 1])
    last = min(end, start + MAX_TOKENS)
    kl, sampler = logp_gap(record, "reference"), logp_gap(record, "sampler")
    return Completion(
        row=row,
        prompt=_prompt_text(record, row, texts),
        reward=None if record.reward is None else _round_finite(record.reward[row]),
        tokens=[
            Token(
                text=token_text(int(record.token_ids[i]), texts),
                kl=_value_at(kl, i),
                sampler=_value_at(sampler, i),
                logp=_value_at(record.logp_old if record.logp_old is not None else record.logp, i),
                logp_sampler=_value_at(record.logp_sampler, i),
                logp_ref=_value_at(record.logp_ref, i),
                trained=bool(record.loss_mask[i]),
            )
            for i in range(start, last)
        ],
        num_hidden=end - last,
    )


def _prompt_text(record: StepRecord, row: int, texts: Mapping[int, str]) -> str:
    if record.prompt_ids is None or record.prompt_offsets is None:
        return ""
    ids = record.prompt_ids[record.prompt_offsets[row] : record.prompt_offsets[row + 1]]
    return "".join(token_text(int(i), texts) for i in ids[-MAX_TOKENS:])


def _top_contributors(
    record: StepRecord, texts: Mapping[int, str]
) -> tuple[list[KLContributor], int]:
    """Return the largest KL contributors, and how many tokens make up half of the KL."""
    k3_values = token_k3(record)
    if k3_values is None:
        return [], 0
    own = np.nan_to_num(k3_values)
    total = own.sum()
    if not total > 0:
        return [], 0
    order = np.argsort(-own)
    num = int(np.searchsorted(np.cumsum(own[order]), total / 2) + 1)
    rows = np.searchsorted(record.row_offsets, order, side="right") - 1
    return [
        KLContributor(
            text=token_text(int(record.token_ids[i]), texts),
            row=int(row),
            position=int(i - record.row_offsets[row]),
            share=float(own[i] / total),
            kl=float(own[i]),
        )
        for i, row in zip(order[: min(num, MAX_CONTRIBUTORS)], rows, strict=False)
    ], num


def _value_at(values: np.ndarray | None, index: int) -> float | None:
    return None if values is None else _round_finite(values[index])


def _round_finite(value: Any) -> float | None:
    return round(float(value), 3) if np.isfinite(value) else None


def colour_limit(steps: Sequence[HeatmapStep]) -> float:
    """Return the KL at which the colour scale saturates: the 99th percentile of shown tokens."""
    every = [
        abs(token.kl)
        for step in steps
        for completion in step.completions
        for token in completion.tokens
        if token.kl is not None
    ]
    return max(0.1, float(np.quantile(every, 0.99))) if every else 0.1
