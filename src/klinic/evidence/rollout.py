"""Sampled completions as token ids by source, never re-tokenized from text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from klinic.errors import EvidenceError
from klinic.evidence.record import EmittedBy, StepRecord

Message = Mapping[str, Any]
"""A chat message with `role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt of the dataset, as it is sampled from and scored."""

    index: int
    """Index in the dataset."""
    text: str
    token_ids: Int[np.ndarray, "P"]
    columns: Mapping[str, Any]
    """The other columns of its row, for reward functions."""
    messages: tuple[Message, ...] | None = None
    """The chat that the model's template rendered as `text`; None for a plain text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Consecutive tokens of a completion from one source."""

    token_ids: Int[np.ndarray, "S"]
    emitted_by: EmittedBy
    logp_sampler: Float[np.ndarray, "S"] | None
    """Log-probs at generation time; None if the sampler reports none."""
    weight_version: int
    """Number of updates of the sampler's weights."""

    def __post_init__(self) -> None:
        logp = self.logp_sampler
        if logp is None:
            return
        if self.emitted_by is not EmittedBy.POLICY:
            raise EvidenceError(
                f"a {self.emitted_by.name.lower()} segment has `logp_sampler`, but the policy "
                "sampled none of its tokens. Pass None."
            )
        if logp.shape != self.token_ids.shape:
            raise EvidenceError(
                f"a segment has {len(self.token_ids)} tokens, but `logp_sampler` has {len(logp)}: "
                "one of them is shifted. Pass the log-prob of every token, and NaN where none was "
                "reported."
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One completion of a prompt."""

    prompt: Prompt
    sample: int
    """Index of the completion among those of its prompt, from 0."""
    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length"]
    text: str
    """The decoded completion, without special tokens."""
    messages: tuple[Message, ...] = ()
    """The turns after a chat prompt: those of the policy and of tools."""
    sent_prompt_ids: Int[np.ndarray, "P"] | None = None
    """Prompt ids as the sampler received them; None if it does not report them."""
    cached_tokens: int | None = None
    """Prompt tokens read from a persistent prefix cache; None if the sampler reports none."""

    @property
    def token_ids(self) -> Int[np.ndarray, "N"]:
        """The tokens of all segments, concatenated."""
        return concatenate_arrays((s.token_ids for s in self.segments), np.int64)

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(s.token_ids) for s in self.segments if s.emitted_by is EmittedBy.POLICY)


def flatten_rollouts(rollouts: Sequence[Rollout], *, step: int) -> StepRecord:
    """Return the rollouts as a record, in order; the loss mask selects the policy's tokens.

    >>> prompt = Prompt(index=7, text="1+1=", token_ids=np.array([5, 6]), columns={})
    >>> answer = Segment(token_ids=np.array([2]), emitted_by=EmittedBy.POLICY,
    ...     logp_sampler=np.array([-0.1], np.float32), weight_version=0)
    >>> flatten_rollouts([Rollout(prompt=prompt, sample=0, segments=(answer,), finish_reason="stop",
    ...     text="2")], step=1).row_offsets
    array([0, 1])
    """
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    emitted_by = _per_token(segments, [s.emitted_by for s in segments], np.int8)
    indices = dict.fromkeys(r.prompt.index for r in rollouts)
    number = {index: group for group, index in enumerate(indices)}
    return StepRecord(
        step=step,
        row_offsets=offsets_from_lengths(
            [sum(len(s.token_ids) for s in r.segments) for r in rollouts]
        ),
        group=np.array([number[r.prompt.index] for r in rollouts], np.int64),
        prompt_index=np.array([r.prompt.index for r in rollouts], np.int64),
        sample=np.array([r.sample for r in rollouts], np.int64),
        prompt_offsets=offsets_from_lengths([len(r.prompt.token_ids) for r in rollouts]),
        prompt_ids=concatenate_arrays((r.prompt.token_ids for r in rollouts), np.int64),
        finish_reason=np.array([r.finish_reason for r in rollouts], np.str_),
        prompt_ids_match=_prompt_ids_match(rollouts),
        cached_tokens=_cached_tokens(rollouts),
        token_ids=concatenate_arrays((s.token_ids for s in segments), np.int64),
        emitted_by=emitted_by,
        loss_mask=emitted_by == EmittedBy.POLICY,
        logp_sampler=_logp_sampler(segments),
        weight_version=_per_token(segments, [s.weight_version for s in segments], np.int64),
    )


def _prompt_ids_match(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    sent_ids = [r.sent_prompt_ids for r in rollouts if r.sent_prompt_ids is not None]
    if len(sent_ids) < len(rollouts) or not rollouts:
        return np.zeros(0, np.bool_) if not rollouts else None
    prompt_ids = [r.prompt.token_ids for r in rollouts]
    lengths = np.array([len(ids) for ids in prompt_ids], np.int64)
    if [len(ids) for ids in sent_ids] != lengths.tolist() or not lengths.all():
        return np.array([*map(np.array_equal, sent_ids, prompt_ids)], np.bool_)
    equal = concatenate_arrays(sent_ids, np.int64) == concatenate_arrays(prompt_ids, np.int64)
    matches: np.ndarray = np.logical_and.reduceat(equal, np.cumsum(lengths) - lengths)
    return matches


def _cached_tokens(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    counts = [r.cached_tokens for r in rollouts if r.cached_tokens is not None]
    return np.array(counts, np.int64) if len(counts) == len(rollouts) else None


def _logp_sampler(segments: Sequence[Segment]) -> np.ndarray | None:
    if all(s.logp_sampler is None for s in segments):
        return None
    joined: np.ndarray = np.concatenate(
        [
            np.full(len(s.token_ids), np.nan, np.float32)
            if s.logp_sampler is None
            else s.logp_sampler
            for s in segments
        ]
    )
    return joined


def _per_token(segments: Sequence[Segment], values: Sequence[int], dtype: Any) -> np.ndarray:
    lengths = np.array([len(s.token_ids) for s in segments], np.int64)
    return np.repeat(np.array(values, dtype), lengths)


def offsets_from_lengths(lengths: Sequence[int]) -> np.ndarray:
    """Return the offsets of concatenated rows of these lengths, with the end."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def concatenate_arrays(arrays: Iterable[np.ndarray], dtype: Any) -> np.ndarray:
    """Return the arrays concatenated as `dtype`."""
    parts = [*arrays]
    joined: np.ndarray = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return joined.astype(dtype, copy=False)
