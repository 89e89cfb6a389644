"""Completions and rewards of one generation, by row, from TRL's sampler and reward functions."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from klinic.evidence.processes import Processes, all_gather_json
from klinic.evidence.row_join import Emission, EmissionIndex, TokenSources
from klinic.integrations.trl.tool_suffixes import ToolSuffixes


@dataclass(slots=True)
class VLLMRecorder:
    """Prompts sent to vLLM in one generation and its cached token counts, per call."""

    prompts: list[Sequence[Sequence[int]]] = field(default_factory=list)
    completions: list[Sequence[Sequence[int]]] = field(default_factory=list)
    cached_tokens: list[list[int | None]] = field(default_factory=list)

    def record_outputs(self, outputs: Sequence[Any]) -> None:
        """Record the outputs of an in-process engine: one row per completion."""
        rows = [output.num_cached_tokens for output in outputs for _ in output.outputs]
        self.cached_tokens.append(rows)

    def emissions(self, eos_ids: Sequence[int]) -> list[Emission]:
        """Return the completions of all calls, each with the prompt that was sent."""
        pairs = [
            pair
            for prompts, completions in zip(self.prompts, self.completions, strict=False)
            if len(prompts) == len(completions)
            for pair in zip(prompts, completions, strict=True)
        ]
        return [
            Emission(
                context=np.asarray(prompt, np.int64),
                token_ids=np.asarray(ids, np.int64),
                is_ended=bool(len(ids)) and int(ids[-1]) in eos_ids,
            )
            for prompt, ids in pairs
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """What was captured while TRL generated: emissions of any model, and vLLM's cache counts."""

    emissions: Sequence[Emission]
    cached_tokens: Sequence[Sequence[int | None]] | None
    """Cached tokens per call of vLLM; None for transformers, which has no prefix cache."""
    pad_id: int | None
    is_unwatched: bool
    """Whether TRL's own sampler can generate without an emission: vLLM, continuous batching."""
    version: int
    fingerprint: str
    loaded_fingerprint: str | None
    suffixes: ToolSuffixes = field(default_factory=ToolSuffixes)
    """Tokens that TRL's template put around tool results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatch:
    """One batch of completions; lists have one row per completion, in generation order."""

    prompt_ids: Sequence[np.ndarray]
    completion_ids: Sequence[np.ndarray]
    sent_prompts: Sequence[np.ndarray] | None
    """The ids that the sampler attended to; None where they were not captured."""
    pad_id: int | None
    """The id that pads rows in TRL's batches."""
    cached_tokens: Sequence[int] | None
    """Tokens of each prompt from the sampler's prefix cache; None where it does not report them."""
    emitted_by: Sequence[np.ndarray] | None
    """Source of each token; None where neither a tool mask nor the sampler's output is known."""
    replaced: Sequence[bool]
    """True for rows that hold other ids than the sampler emitted."""
    reencoded: Sequence[bool] | None
    """True for those changed as decoding and encoding does; None where emissions are unknown."""
    is_elsewhere: Sequence[bool]
    """True for rows whose last turn was sampled after other ids than they hold before it."""
    logp_sampler: Sequence[np.ndarray] | None
    texts: Sequence[str]
    version: int
    """Updates made before this generation."""
    fingerprint: str
    """Fingerprint of the policy's trained weights."""
    loaded_fingerprint: str | None
    """That of the same weights in another model that sampled; None if the policy did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBatch:
    """Rewards of the rows of one generation."""

    prompts: Sequence[str]
    by_function: dict[str, np.ndarray]
    """Unweighted rewards by function."""
    total: np.ndarray
    group: np.ndarray
    """Group of each row, numbered over all processes."""
    sample: np.ndarray
    """Index of each row within its group."""
    num_rows: int
    """Rows of the generation in all processes."""
    num_split_groups: int
    """Groups of one prompt of the dataset whose members received different prompts."""


def build_generation_batch(generated: Sequence[Any], sampler: SamplerOutput) -> GenerationBatch:
    """Build the batch from the outputs of TRL's `_generate`: prompts, completions, mask, texts."""
    prompt_ids, completion_ids, tool_mask, completions, logprobs = generated[:5]
    prompts = [np.asarray(ids, np.int64) for ids in prompt_ids]
    rows = [np.asarray(ids, np.int64) for ids in completion_ids]
    index = EmissionIndex(sampler.emissions)
    sources = [
        index.trace_tokens(prompt, ids, row=row, num_rows=len(rows))
        for row, (prompt, ids) in enumerate(zip(prompts, rows, strict=True))
    ]
    reported = None if logprobs is None else [np.asarray(row, np.float32) for row in logprobs]
    return GenerationBatch(
        prompt_ids=prompts,
        completion_ids=rows,
        sent_prompts=_sent_prompts(sources),
        pad_id=sampler.pad_id,
        cached_tokens=[0] * len(rows)
        if sampler.cached_tokens is None
        else _cached_token_counts(sampler.cached_tokens, len(rows)),
        emitted_by=_token_emitters(rows, sources, tool_mask, sampler),
        replaced=[source is not None and bool(source.replaced.any()) for source in sources],
        reencoded=_reencoded_rows(sources),
        is_elsewhere=[source is not None and source.is_elsewhere for source in sources],
        logp_sampler=_sampler_logp(sources, reported),
        texts=[_completion_text(completion) for completion in completions],
        version=sampler.version,
        fingerprint=sampler.fingerprint,
        loaded_fingerprint=sampler.loaded_fingerprint,
    )


def _token_emitters(
    rows: Sequence[np.ndarray],
    sources: Sequence[TokenSources | None],
    tool_mask: Sequence[Sequence[int]] | None,
    sampler: SamplerOutput,
) -> list[np.ndarray] | None:
    """Return the source of each token: what the sampler emitted is the policy's.

    A row of unknown emission is the policy's where the tool mask says so; without a mask, only if
    the sampler can generate without an emission.
    """
    if tool_mask is None and not sampler.is_unwatched and any(source is None for source in sources):
        return None
    masks = [np.ones(len(ids), bool) for ids in rows] if tool_mask is None else tool_mask
    emitters = []
    for ids, mask, source in zip(rows, masks, sources, strict=True):
        is_policy = np.asarray(mask, bool)
        if source is not None and source.replaced.any():  # a re-encoded row has no exact places
            is_policy = is_policy & source.emitted
        elif source is not None:
            is_policy = source.emitted
        emitters.append(sampler.suffixes.token_emitters(ids, is_policy))
    return emitters


def _sampler_logp(
    sources: Sequence[TokenSources | None], reported: Sequence[np.ndarray] | None
) -> list[np.ndarray] | None:
    """Return the reported log-probs, else the recorded ones; NaN for tokens that were inserted."""
    if reported is not None:
        return [
            logp
            if source is None or len(logp) != len(source.emitted)
            else np.where(source.emitted, logp, np.float32(np.nan))
            for logp, source in zip(reported, sources, strict=True)
        ]
    recorded = [source.logp for source in sources if source is not None]
    if len(recorded) < len(sources) or not any(np.isfinite(logp).any() for logp in recorded):
        return None
    return recorded


def _reencoded_rows(sources: Sequence[TokenSources | None]) -> list[bool] | None:
    known = [source for source in sources if source is not None]
    return [source.is_reencoded for source in known] if len(known) == len(sources) else None


def _sent_prompts(sources: Sequence[TokenSources | None]) -> list[np.ndarray] | None:
    contexts = [source.context for source in sources if source is not None]
    known = [context for context in contexts if context is not None]
    return known if len(known) == len(sources) else None


def _cached_token_counts(calls: Sequence[Sequence[int | None]], num_rows: int) -> list[int] | None:
    """Return the cached tokens of each row; None unless one in-process call reported them."""
    reported = calls[0] if len(calls) == 1 else []
    counts = [num for num in reported if num is not None]
    return counts if len(counts) == num_rows else None


def _completion_text(completion: Any) -> str:
    """Return a completion as text; the messages of a chat are joined by newlines."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content", "")) for message in completion)


def build_reward_batch(
    per_function: np.ndarray,
    names: Sequence[str],
    weights: np.ndarray,
    prompts: Sequence[Any],
    groups: "GroupRows",
) -> RewardBatch:
    """Build the rewards of this process's rows from TRL's of all processes.

    The weighted sum is NaN where no function returned a reward.
    """
    rewards = np.asarray(per_function, np.float64)[groups.own]
    total = np.nansum(rewards * weights, axis=1)
    total[np.isnan(rewards).all(axis=1)] = np.nan
    return RewardBatch(
        prompts=[_completion_text(prompt) for prompt in prompts],
        by_function={name: rewards[:, i] for i, name in enumerate(names)},
        total=total,
        group=groups.group[groups.own],
        sample=groups.sample[groups.own],
        num_rows=len(groups.group),
        num_split_groups=groups.num_split,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """The groups of the rows of a generation in all processes."""

    group: np.ndarray
    sample: np.ndarray
    own: slice
    """The rows of this process."""
    num_split: int
    """Groups of one prompt of the dataset whose members received different prompts."""


def find_groups(
    asked: Sequence[Any], prompts: Sequence[Any], size: int, processes: Processes
) -> GroupRows:
    """Return the groups of all processes' rows, in TRL's order: by rank; a group may span ranks.

    `asked` are the prompts of the dataset, `prompts` those that the policy received: the `reset` of
    an environment adds to them.
    """
    texts = [[_prompt_key(row, processes) for row in rows] for rows in (asked, prompts)]
    by_rank = all_gather_json(processes, list(zip(*texts, strict=True)))
    first = sum(len(part) for part in by_rank[: processes.rank])
    pairs = [pair for part in by_rank for pair in part]
    group = group_ids([pair[0] for pair in pairs], size)
    received: dict[int, set[str]] = {}
    for number, pair in zip(group.tolist(), pairs, strict=True):
        received.setdefault(number, set()).add(pair[1])
    return GroupRows(
        group=group,
        sample=sample_indices(group),
        own=slice(first, first + len(prompts)),
        num_split=sum(len(texts) > 1 for texts in received.values()),
    )


def _prompt_key(prompt: Any, processes: Processes) -> str:
    """Return a text that identifies a prompt, short where it is sent to other processes."""
    text = repr(prompt)
    return text if processes.size == 1 else hashlib.sha256(text.encode()).hexdigest()[:32]


def sample_indices(group: np.ndarray) -> np.ndarray:
    """Return the index of each row within its group.

    >>> sample_indices(np.array([0, 0, 1, 0])).tolist()
    [0, 1, 0, 2]
    """
    last_index: dict[int, int] = {}
    counted = []
    for number in group.tolist():
        last_index[number] = last_index.get(number, -1) + 1
        counted.append(last_index[number])
    return np.array(counted, np.int64)


def group_ids(prompts: Sequence[Any], size: int) -> np.ndarray:
    """Return the group of each row: TRL compares `size` consecutive rows.

    Where these have different prompts, rows are grouped by prompt instead, so that a check can
    detect TRL's wrong grouping.

    >>> group_ids(["a", "a", "b", "b"], 2).tolist(), group_ids(["a", "b", "a", "b"], 2).tolist()
    ([0, 0, 1, 1], [0, 1, 0, 1])
    """
    texts = [repr(prompt) for prompt in prompts]
    blocks = [texts[i : i + size] for i in range(0, len(texts), size)]
    if all(len(set(block)) == 1 for block in blocks):
        return np.arange(len(texts)) // size
    id_of_prompt: dict[str, int] = {}
    return np.array([id_of_prompt.setdefault(text, len(id_of_prompt)) for text in texts], np.int64)
