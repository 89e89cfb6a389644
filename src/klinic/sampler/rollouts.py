"""Creates rollouts from prompts, computes their remaining tokens and appends policy turns."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from klinic.errors import DataError
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment
from klinic.model.loading import Policy
from klinic.sampler.decoding import FinishReason, Stream
from klinic.sampler.random_streams import RandomStream


def empty_rollouts(prompts: Sequence[Prompt], group_size: int) -> list[Rollout]:
    """Return one empty rollout per sample, grouped by prompt."""
    return [
        Rollout(prompt=prompt, sample=sample, segments=(), finish_reason="length", text="")
        for prompt in prompts
        for sample in range(group_size)
    ]


def context_ids(rollout: Rollout) -> np.ndarray:
    """Return the prompt and completion tokens that precede the next token."""
    return np.concatenate([rollout.prompt.token_ids, rollout.token_ids])


def remaining_tokens(rollout: Rollout, policy: Policy, max_new_tokens: int) -> int:
    """Return how many tokens a completion may still get; raise if the prompt does not fit."""
    left = max_new_tokens - rollout.num_policy_tokens
    length, window = len(context_ids(rollout)), policy.context_window
    if window is None:
        return left
    if rollout.segments:  # tool tokens use up the context window too
        return max(0, min(left, window - length))
    if length + left > window:
        prompt = rollout.prompt
        raise DataError(
            f"row {prompt.index + 1}: the prompt has {len(prompt.token_ids)} tokens; with "
            f"sampling.max_new_tokens = {max_new_tokens} it exceeds the {window}-token "
            f"context window of {policy.name}. Shorten the prompt or lower the limit."
        )
    return left


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportedLogp:
    """Log-probs of several tokens at each position of a completion, concatenated."""

    positions: Int[np.ndarray, "K"]
    token_ids: Int[np.ndarray, "K"]
    logp: Float[np.ndarray, "K"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRequest:
    """A context to continue, and the random numbers of the turn."""

    context: Int[np.ndarray, "n"]
    numbers: RandomStream

    def make_stream(self) -> Stream:
        """Return the turn as a stream without tokens."""
        return Stream(context=self.context, uniforms=self.numbers.uniforms())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationOutput:
    """The tokens generated in one call, with their log-probs: one policy turn of a rollout."""

    token_ids: Int[np.ndarray, "S"]
    logp: Float[np.ndarray, "S"]
    finish_reason: FinishReason
    context: Int[np.ndarray, "C"]
    """The context token ids as the engine reported them."""
    cached_tokens: int
    top: ReportedLogp | None = None
    """Log-probs of the sampled and of the most likely tokens; None if they were not requested."""


def token_array(token_ids: Sequence[int]) -> Int[np.ndarray, "S"]:
    """Return token ids from a list as an array; `struct` takes half the time of NumPy."""
    return np.frombuffer(struct.pack(f"{len(token_ids)}q", *token_ids), np.int64)


def logp_array(logp: Sequence[float]) -> Float[np.ndarray, "S"]:
    """Return log-probs from a list as an array."""
    return np.frombuffer(struct.pack(f"{len(logp)}f", *logp), np.float32)


def append_turn(
    rollout: Rollout, turn: GenerationOutput, policy: Policy, *, version: int
) -> Rollout:
    """Return the rollout with a policy turn appended."""
    segment = Segment(
        token_ids=turn.token_ids,
        emitted_by=EmittedBy.POLICY,
        logp_sampler=turn.logp,
        weight_version=version,
    )
    longer = replace(
        rollout,
        segments=(*rollout.segments, segment),
        finish_reason=turn.finish_reason,
        sent_prompt_ids=turn.context[: len(turn.context) - len(rollout.token_ids)],
        cached_tokens=turn.cached_tokens,
    )
    longer = replace(longer, text=_decode_text(longer.token_ids, policy))
    if rollout.prompt.messages is None:
        return longer
    # the text of a first turn is that of the completion
    said = _decode_text(segment.token_ids, policy) if rollout.segments else longer.text
    message = {"role": "assistant", "content": said}
    return replace(longer, messages=(*rollout.messages, message))


def _decode_text(token_ids: np.ndarray, policy: Policy) -> str:
    text: str = policy.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
    return text
