"""The tokens of a step at which two log-prob columns can be compared, with what is known of them.

`gap_models` fits its candidates to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.checks.measures import (
    column_difference,
    finite_trained_tokens,
    float64_column,
    row_numbers,
)
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.maths.arrays import row_of_token, segment_sum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GapTokens:
    """The trained tokens with finite log-probs on both sides, concatenated by row."""

    record: StepRecord
    index: Int[np.ndarray, "K"]
    """Position of each token in the record."""
    gap: Float[np.ndarray, "K"]
    """`column - logp_old`."""
    logp: Float[np.ndarray, "K"]
    other: Float[np.ndarray, "K"]
    entropy: Float[np.ndarray, "K"] | None
    """None if it was not recorded at all of these tokens."""
    row: Int[np.ndarray, "K"]
    ids: Int[np.ndarray, "K"]

    @property
    def surprise(self) -> Float[np.ndarray, "K"]:
        """The learner's surprise."""
        return -self.logp

    @property
    def position(self) -> Int[np.ndarray, "K"]:
        """Position of each token in its completion."""
        return np.asarray(self.index - self.record.row_offsets[:-1][self.row])

    @property
    def routing(self) -> Float[np.ndarray, "K"] | None:
        """Fraction of layers whose experts differ."""
        column = self.record.routing_mismatch
        return None if column is None else np.nan_to_num(np.asarray(column, float))[self.index]

    @property
    def prompt_lengths(self) -> Int[np.ndarray, "B"] | None:
        """Length of the prompt of each row."""
        offsets = self.record.prompt_offsets
        return None if offsets is None else np.diff(offsets)

    @property
    def row_gaps(self) -> Float[np.ndarray, "B"]:
        """Mean absolute gap of each row; NaN for a row without such tokens."""
        num_rows = self.record.num_rows
        counts = np.bincount(self.row, minlength=num_rows)
        sums = np.bincount(self.row, np.abs(self.gap), minlength=num_rows)
        means: np.ndarray = np.full(num_rows, np.nan)
        np.divide(sums, counts, out=means, where=counts > 0)
        return means

    def row_flags(self, kind: str) -> Bool[np.ndarray, "K"] | None:
        """Return a mask of the tokens in rows of a kind; None if it was not recorded."""
        record = self.record
        columns = {
            "prompt_differs": None if record.prompt_ids_match is None else ~record.prompt_ids_match,
            "retokenised": None if record.round_trip is None else ~record.round_trip,
            "cached": None if record.cached_tokens is None else record.cached_tokens > 0,
        }
        flags = columns[kind]
        return None if flags is None else np.asarray(flags, dtype=bool)[self.row]

    @property
    def in_later_turn(self) -> Bool[np.ndarray, "K"]:
        """True at tokens behind the first reply of an environment or template in their row.

        If emitters were not recorded, a reply is what is not trained on between trained tokens.
        """
        emitted_by, mask = self.record.emitted_by, self.record.loss_mask
        is_reply = ~mask if emitted_by is None else emitted_by != EmittedBy.POLICY
        replies = np.concatenate([[0], np.cumsum(is_reply)])
        row_starts = self.record.row_offsets[:-1][self.row]
        return np.asarray(replies[self.index] > replies[row_starts])

    def neighbours(self, shift: int) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
        """Return the tokens whose neighbour at a distance is in the same row, and these."""
        first, last = max(0, -shift), self.index.size - max(0, shift)
        here = np.arange(first, max(last, first))
        there = here + shift
        same = (self.row[here] == self.row[there]) & (self.index[there] - self.index[here] == shift)
        return here[same], there[same]

    @property
    def repeated(self) -> Bool[np.ndarray, "K"] | None:
        """True at tokens that occur in the prompt or earlier in the row."""
        record = self.record
        if record.prompt_ids is None or record.prompt_offsets is None:
            return None
        selected: np.ndarray = repeated_tokens(record)[self.index]
        return selected


def repeated_tokens(record: StepRecord) -> Bool[np.ndarray, "N"]:
    """Return a mask of the tokens that occur in their prompt or earlier in their row."""
    assert record.prompt_ids is not None  # noqa: S101 - the caller has prompts
    assert record.prompt_offsets is not None  # noqa: S101 - recorded together
    rows = np.concatenate([row_of_token(record.prompt_offsets), row_numbers(record)])
    ids = np.concatenate([record.prompt_ids, record.token_ids]).astype(np.int64)
    ids -= ids.min(initial=0)
    # prompts come first, so that the first of equal keys is the earliest
    firsts = np.unique(rows * (ids.max(initial=0) + 1) + ids, return_index=True)[1]
    repeated = np.ones(ids.size, dtype=bool)
    repeated[firsts] = False
    return repeated[record.prompt_ids.size :]


def declared_transforms(sampling: Mapping[str, Any]) -> str:
    """Return the truncations and penalties that run.json declares; empty for none."""
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    declared = {k: sampling.get(k) for k, v in neutral.items() if sampling.get(k) not in (None, v)}
    if declared.get("top_k") == -1:  # disabled in vLLM
        del declared["top_k"]
    return ", ".join(f"{name} {value}" for name, value in declared.items())


def collect_gap_tokens(record: StepRecord, column: str) -> GapTokens:
    """Return the tokens at which a column can be compared with `logp_old`."""
    index = np.flatnonzero(finite_trained_tokens(record, column, "logp_old"))
    entropy = None
    if record.entropy is not None:
        values = float64_column(record, "entropy")[index]
        entropy = values if np.isfinite(values).all() else None
    return GapTokens(
        record=record,
        index=index,
        gap=column_difference(record, column, "logp_old")[index],
        logp=float64_column(record, "logp_old")[index],
        other=float64_column(record, column)[index],
        entropy=entropy,
        row=row_numbers(record)[index],
        ids=np.asarray(record.token_ids[index]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SurpriseExcess:
    """A side's surprise above the learner's entropy."""

    mean: float
    """Nats per token."""
    errors: float
    """The same in standard errors over groups of rows, whose completions correlate."""


def surprise_excess(tokens: GapTokens, logp: Float[np.ndarray, "K"]) -> SurpriseExcess:
    """Return how far tokens surprise a side above the learner's entropy; 0 without entropies.

    For the learner, the expectation is 0 for tokens that its own distribution sampled, and at
    most 0 for those of a truncation to its likelier tokens.
    """
    if tokens.entropy is None or not tokens.gap.size:
        return SurpriseExcess(mean=0.0, errors=0.0)
    excess = -logp - tokens.entropy
    record = tokens.record
    sums = segment_sum(excess, tokens.row, record.num_rows)
    _, group = np.unique(record.group, return_inverse=True)
    means = np.bincount(group, sums) / np.bincount(group)
    if means.size < 2:  # one group: its rows are all there is
        means = sums
    if means.size < 2:
        return SurpriseExcess(mean=float(excess.mean()), errors=0.0)
    error = float(means.std(ddof=1) / np.sqrt(means.size))
    return SurpriseExcess(mean=float(excess.mean()), errors=float(means.mean()) / (error + 1e-12))
