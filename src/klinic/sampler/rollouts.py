"""From prompts to rollouts: where each begins, how far it may go, and how it grows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from klinic.errors import DataError
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment
from klinic.model.loading import Policy
from klinic.sampler.decoding import FinishReason


def started(prompts: Sequence[Prompt], group_size: int) -> list[Rollout]:
    """Return the empty completions of every prompt, one group behind the other."""
    return [
        Rollout(prompt=prompt, sample=sample, segments=(), finish_reason="length", text="")
        for prompt in prompts
        for sample in range(group_size)
    ]


def context_of(rollout: Rollout) -> np.ndarray:
    """Return everything that stands before the next token."""
    return np.concatenate([rollout.prompt.token_ids, rollout.token_ids])


def room(rollout: Rollout, policy: Policy, max_new_tokens: int) -> int:
    """Return how many tokens a completion may still have; refuse a prompt that leaves too few."""
    left = max_new_tokens - rollout.num_policy_tokens
    length, window = len(context_of(rollout)), policy.context_window
    if window is None:
        return left
    if rollout.segments:  # answers of tools take room of their own
        return max(0, min(left, window - length))
    if length + left > window:
        prompt = rollout.prompt
        raise DataError(
            f"row {prompt.index + 1}: its prompt has {len(prompt.token_ids)} tokens, and with "
            f"completions of sampling.max_new_tokens = {max_new_tokens} it does not fit into the "
            f"{window} tokens of {policy.name}. Shorten the prompt or the limit."
        )
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the policy said next."""

    token_ids: Sequence[int]
    logp: Sequence[float]
    finish_reason: FinishReason
    context: Sequence[int]
    """What it was said behind, as the engine had it."""
    cached_tokens: int


def grown(rollout: Rollout, said: Said, policy: Policy, *, version: int) -> Rollout:
    """Return the rollout with what the policy said behind it."""
    segment = Segment(
        token_ids=np.array(said.token_ids, dtype=np.int64),
        emitted_by=EmittedBy.POLICY,
        logp_sampler=np.array(said.logp, dtype=np.float32),
        weight_version=version,
    )
    longer = replace(
        rollout,
        segments=(*rollout.segments, segment),
        finish_reason=said.finish_reason,
        sent=np.asarray(said.context, dtype=np.int64)[: len(said.context) - len(rollout.token_ids)],
        cached_tokens=said.cached_tokens,
    )
    longer = replace(longer, text=_text(longer.token_ids, policy))
    if rollout.prompt.messages is None:
        return longer
    message = {"role": "assistant", "content": _text(segment.token_ids, policy)}
    return replace(longer, messages=(*rollout.messages, message))


def _text(token_ids: np.ndarray, policy: Policy) -> str:
    text: str = policy.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
    return text
