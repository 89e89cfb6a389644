"""Completions and rewards of one generation, by row, from TRL's sampler and reward functions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from klinic.evidence.record import EmittedBy
from klinic.integrations.trl.sampled_logprobs import LogitsRecorder


@dataclass(slots=True)
class VLLMRecorder:
    """Prompts sent to vLLM in one generation and its cached token counts, per call."""

    prompts: list[Sequence[Sequence[int]]] = field(default_factory=list)
    cached_tokens: list[list[int | None]] = field(default_factory=list)

    def record_outputs(self, outputs: Sequence[Any]) -> None:
        """Record the outputs of an in-process engine: one row per completion."""
        rows = [output.num_cached_tokens for output in outputs for _ in output.outputs]
        self.cached_tokens.append(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatch:
    """One batch of completions; lists have one row per completion, in generation order."""

    completion_ids: Sequence[np.ndarray]
    sent_prompts: Sequence[np.ndarray] | None
    """The prompts sent to the sampler; None where they were not captured."""
    pad_id: int | None
    """Left padding of these prompts for `generate`; None for vLLM, which gets unpadded prompts."""
    cached_tokens: Sequence[int] | None
    """Tokens of each prompt from the sampler's prefix cache; None where it does not report them."""
    emitted_by: Sequence[np.ndarray]
    logp_sampler: Sequence[np.ndarray] | None
    texts: Sequence[str]
    version: int
    """Updates made before this generation."""
    fingerprint: str
    """Fingerprint of the trained weights that sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBatch:
    """Rewards of the rows of one generation."""

    prompts: Sequence[str]
    by_function: dict[str, np.ndarray]
    """Unweighted rewards by function."""
    total: np.ndarray
    group: np.ndarray


def build_generation_batch(
    generated: Sequence[Any],
    recorder: LogitsRecorder,
    vllm_recorder: VLLMRecorder | None,
    *,
    pad_id: int,
    version: int,
    fingerprint: str,
) -> GenerationBatch:
    """Build the batch from the outputs of TRL's `_generate`: prompts, completions, mask, texts.

    The sampler is transformers' `generate` or vLLM.
    """
    _, completion_ids, tool_mask, completions, logprobs = generated[:5]
    rows = [np.asarray(ids, np.int64) for ids in completion_ids]
    if tool_mask is None:
        emitted_by = [np.full(len(ids), EmittedBy.POLICY, np.int8) for ids in rows]
    else:
        policy_masks = [np.asarray(mask, bool) for mask in tool_mask]
        emitted_by = [
            np.where(mask, EmittedBy.POLICY, EmittedBy.TOOL).astype(np.int8)
            for mask in policy_masks
        ]
    reported = None if logprobs is None else [np.asarray(row, np.float32) for row in logprobs]
    return GenerationBatch(
        completion_ids=rows,
        sent_prompts=_find_sent_prompts(recorder, vllm_recorder, len(rows)),
        pad_id=pad_id if vllm_recorder is None else None,
        cached_tokens=[0] * len(rows)
        if vllm_recorder is None
        else _cached_token_counts(vllm_recorder, len(rows)),
        emitted_by=emitted_by,
        logp_sampler=recorder.completion_logp(completion_ids) if reported is None else reported,
        texts=[_completion_text(completion) for completion in completions],
        version=version,
        fingerprint=fingerprint,
    )


def _find_sent_prompts(
    recorder: LogitsRecorder, vllm_recorder: VLLMRecorder | None, num_rows: int
) -> list[np.ndarray] | None:
    """Return the prompts sent to the sampler; None unless there was exactly one call."""
    calls = (
        [] if vllm_recorder is None else [list(map(np.asarray, p)) for p in vllm_recorder.prompts]
    )
    if recorder.prompt_ids is not None:
        calls += [list(recorder.prompt_ids.cpu().numpy())] * recorder.num_generations
    return calls[0] if len(calls) == 1 and len(calls[0]) == num_rows else None


def _cached_token_counts(vllm_recorder: VLLMRecorder, num_rows: int) -> list[int] | None:
    """Return the cached tokens of each row; None unless one in-process call reported them."""
    reported = vllm_recorder.cached_tokens[0] if len(vllm_recorder.cached_tokens) == 1 else []
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
    group_size: int,
) -> RewardBatch:
    """Build the rewards of the rows; the weighted sum is NaN where no function returned one."""
    rewards = np.asarray(per_function, np.float64)
    total = np.nansum(rewards * weights, axis=1)
    total[np.isnan(rewards).all(axis=1)] = np.nan
    return RewardBatch(
        prompts=[_completion_text(prompt) for prompt in prompts],
        by_function={name: rewards[:, i] for i, name in enumerate(names)},
        total=total,
        group=group_ids(prompts, group_size),
    )


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
