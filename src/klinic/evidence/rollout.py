"""Completions as the sampler made them: token ids by who emitted them, never re-made from text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from klinic.errors import EvidenceError
from klinic.evidence.record import EmittedBy, StepRecord

Message = Mapping[str, Any]
"""`role` and `content`, as chat templates know them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt of the dataset, as it is sent to the sampler and scored."""

    index: int
    """Its place in the dataset."""
    text: str
    token_ids: Int[np.ndarray, "P"]
    columns: Mapping[str, Any]
    """The other columns of its row, for reward functions."""
    messages: tuple[Message, ...] | None = None
    """The chat that `text` was made of by the model's template; None for a plain text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Neighbouring tokens of a completion that one party emitted."""

    token_ids: Int[np.ndarray, "S"]
    emitted_by: EmittedBy
    logp_sampler: Float[np.ndarray, "S"] | None
    """As reported while generating; None where the sampler reports none."""
    weight_version: int
    """How many updates the sampler's weights had seen."""

    def __post_init__(self) -> None:
        logp = self.logp_sampler
        if logp is None:
            return
        if self.emitted_by is not EmittedBy.POLICY:
            raise EvidenceError(
                f"a {self.emitted_by.name.lower()} segment has `logp_sampler`, but the policy "
                "sampled none of its tokens. Give None."
            )
        if logp.shape != self.token_ids.shape:
            raise EvidenceError(
                f"a segment has {len(self.token_ids)} tokens, but `logp_sampler` has {len(logp)}: "
                "one of them is shifted. Give the log-prob of every token, and NaN where none was "
                "reported."
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One completion of a prompt."""

    prompt: Prompt
    sample: int
    """Which of the prompt's completions, counted from 0."""
    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length"]
    text: str
    """All that was said, without special tokens."""
    messages: tuple[Message, ...] = ()
    """The turns behind a chat prompt: the policy's, and those of tools between them."""
    sent: Int[np.ndarray, "P"] | None = None
    """The prompt's ids as the sampler used them; None where it does not say."""
    cached_tokens: int | None = None
    """Prompt tokens out of a cache that outlives the call; None where the sampler does not say."""

    @property
    def token_ids(self) -> Int[np.ndarray, "N"]:
        """The tokens of all segments, end to end."""
        return end_to_end((s.token_ids for s in self.segments), np.int64)

    @property
    def num_policy_tokens(self) -> int:
        """How many tokens the policy emitted."""
        return sum(len(s.token_ids) for s in self.segments if s.emitted_by is EmittedBy.POLICY)


def flatten(rollouts: Sequence[Rollout], *, step: int) -> StepRecord:
    """Return the rollouts as a record, rows in the given order, trained on where the policy spoke.

    >>> prompt = Prompt(index=7, text="1+1=", token_ids=np.array([5, 6]), columns={})
    >>> said = Segment(token_ids=np.array([2]), emitted_by=EmittedBy.POLICY,
    ...     logp_sampler=np.array([-0.1], np.float32), weight_version=0)
    >>> flatten([Rollout(prompt=prompt, sample=0, segments=(said,), finish_reason="stop",
    ...     text="2")], step=1).row_offsets
    array([0, 1])
    """
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    emitted_by = _per_token(segments, [s.emitted_by for s in segments], np.int8)
    indices = dict.fromkeys(r.prompt.index for r in rollouts)
    number = {index: group for group, index in enumerate(indices)}
    return StepRecord(
        step=step,
        row_offsets=offsets_of([sum(len(s.token_ids) for s in r.segments) for r in rollouts]),
        group=np.array([number[r.prompt.index] for r in rollouts], np.int64),
        prompt_index=np.array([r.prompt.index for r in rollouts], np.int64),
        sample=np.array([r.sample for r in rollouts], np.int64),
        prompt_offsets=offsets_of([len(r.prompt.token_ids) for r in rollouts]),
        prompt_ids=end_to_end((r.prompt.token_ids for r in rollouts), np.int64),
        finish_reason=np.array([r.finish_reason for r in rollouts], np.str_),
        prompt_ids_match=_prompt_ids_match(rollouts),
        cached_tokens=_cached_tokens(rollouts),
        token_ids=end_to_end((s.token_ids for s in segments), np.int64),
        emitted_by=emitted_by,
        loss_mask=emitted_by == EmittedBy.POLICY,
        logp_sampler=_logp_sampler(segments),
        weight_version=_per_token(segments, [s.weight_version for s in segments], np.int64),
    )


def _prompt_ids_match(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    known = [(r.sent, r.prompt.token_ids) for r in rollouts if r.sent is not None]
    if len(known) < len(rollouts):
        return None
    return np.array([np.array_equal(*both) for both in known], np.bool_)


def _cached_tokens(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    known = [r.cached_tokens for r in rollouts if r.cached_tokens is not None]
    return np.array(known, np.int64) if len(known) == len(rollouts) else None


def _logp_sampler(segments: Sequence[Segment]) -> np.ndarray | None:
    if all(s.logp_sampler is None for s in segments):
        return None
    unknown = (np.full(len(s.token_ids), np.nan, np.float32) for s in segments)
    pairs = zip(segments, unknown, strict=True)
    known = [nan if s.logp_sampler is None else s.logp_sampler for s, nan in pairs]
    joined: np.ndarray = np.concatenate(known)
    return joined


def _per_token(segments: Sequence[Segment], values: Sequence[int], dtype: Any) -> np.ndarray:
    lengths = np.array([len(s.token_ids) for s in segments], np.int64)
    return np.repeat(np.array(values, dtype), lengths)


def offsets_of(lengths: Sequence[int]) -> np.ndarray:
    """Return where rows of these lengths start when they lie end to end, and the end."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def end_to_end(arrays: Iterable[np.ndarray], dtype: Any) -> np.ndarray:
    """Return the rows as one array."""
    joined: np.ndarray = np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
    return joined
