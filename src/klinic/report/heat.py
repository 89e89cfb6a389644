"""Token heat map: signed KL of every token in selected completions, and the largest contributors.

The colour of a token is k1, logp_old - logp_ref: positive if the policy assigns it a higher
log-prob than the reference. Its contribution to the KL is its k3, which is never negative.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.report.gaps import gap, token_k3

NUM_COMPLETIONS = 4  # completions per step, of different prompts if possible
LONGEST = 160  # tokens shown per completion
LONGEST_TEXT = 24  # characters shown per token
NUM_OWNERS = 12
DISAGREES = 0.1  # nats between learner and sampler from which a token is highlighted


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
class Owner:
    """A token that contributes a large part of a step's KL."""

    text: str
    row: int
    position: int
    share: float
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatStep:
    """One step of the heat map."""

    step: int
    completions: list[Completion]
    owners: list[Owner]
    num_owners: int
    """The smallest number of tokens that make up half of the step's KL."""
    num_tokens: int


def heat_step(record: StepRecord, texts: Mapping[int, str]) -> HeatStep:
    """Return the heat map of a step."""
    owners, num = _owners(record, texts)
    return HeatStep(
        step=record.step,
        completions=[_completion(record, row, texts) for row in _chosen(record)],
        owners=owners,
        num_owners=num,
        num_tokens=int(record.loss_mask.sum()),
    )


def shown(token_id: int, texts: Mapping[int, str]) -> str:
    """Return a token's text, shortened; its id if the text is unknown.

    >>> shown(7, {7: "a" * 30}), shown(8, {})
    ('aaaaaaaaaaaaaaaaaaaaaaa\u2026', '#8')
    """
    text = texts.get(token_id, f"#{token_id}")
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "\u2026"


def _chosen(record: StepRecord) -> list[int]:
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
    kl = gap(record, "reference")
    sizes = np.zeros(record.num_tokens) if kl is None else np.nan_to_num(np.abs(kl))
    sums = np.concatenate([[0.0], np.cumsum(sizes)])
    return np.diff(sums[record.row_offsets])


def _completion(record: StepRecord, row: int, texts: Mapping[int, str]) -> Completion:
    start, end = int(record.row_offsets[row]), int(record.row_offsets[row + 1])
    last = min(end, start + LONGEST)
    kl, sampler = gap(record, "reference"), gap(record, "sampler")
    return Completion(
        row=row,
        prompt=_prompt(record, row, texts),
        reward=None if record.reward is None else _number(record.reward[row]),
        tokens=[
            Token(
                text=shown(int(record.token_ids[i]), texts),
                kl=_at(kl, i),
                sampler=_at(sampler, i),
                logp=_at(record.logp_old if record.logp_old is not None else record.logp, i),
                logp_sampler=_at(record.logp_sampler, i),
                logp_ref=_at(record.logp_ref, i),
                trained=bool(record.loss_mask[i]),
            )
            for i in range(start, last)
        ],
        num_hidden=end - last,
    )


def _prompt(record: StepRecord, row: int, texts: Mapping[int, str]) -> str:
    if record.prompt_ids is None or record.prompt_offsets is None:
        return ""
    ids = record.prompt_ids[record.prompt_offsets[row] : record.prompt_offsets[row + 1]]
    return "".join(shown(int(i), texts) for i in ids[-LONGEST:])


def _owners(record: StepRecord, texts: Mapping[int, str]) -> tuple[list[Owner], int]:
    """Return the largest KL contributors, and how many tokens make up half of the KL."""
    known = token_k3(record)
    if known is None:
        return [], 0
    own = np.nan_to_num(known)
    total = own.sum()
    if not total > 0:
        return [], 0
    order = np.argsort(-own)
    num = int(np.searchsorted(np.cumsum(own[order]), total / 2) + 1)
    rows = np.searchsorted(record.row_offsets, order, side="right") - 1
    return [
        Owner(
            text=shown(int(record.token_ids[i]), texts),
            row=int(row),
            position=int(i - record.row_offsets[row]),
            share=float(own[i] / total),
            kl=float(own[i]),
        )
        for i, row in zip(order[: min(num, NUM_OWNERS)], rows, strict=False)
    ], num


def _at(values: np.ndarray | None, index: int) -> float | None:
    return None if values is None else _number(values[index])


def _number(value: Any) -> float | None:
    return round(float(value), 3) if np.isfinite(value) else None


def largest(steps: Sequence[HeatStep]) -> float:
    """Return the KL at which the colour scale saturates: the 99th percentile of shown tokens."""
    every = [
        abs(token.kl)
        for step in steps
        for completion in step.completions
        for token in completion.tokens
        if token.kl is not None
    ]
    return max(0.1, float(np.quantile(every, 0.99))) if every else 0.1
