"""Multi-turn rollouts: the policy generates a turn, a user function replies, the policy continues.

Tokens of the reply and of the chat template around it are marked as tool tokens and not trained on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.errors import ConfigError, FunctionError, KlinicError, error_text
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Message, Prompt, Rollout, Segment
from klinic.model.chat import PromptEncoder
from klinic.model.weights import Weights
from klinic.runtime.user_code import guard_process
from klinic.sampler.protocol import LoadResult, Sampler, release_sampler_memory

EnvironmentReply = Callable[..., Any]
"""`reply(messages, **columns)` returns text, a message, or None to end the conversation."""
TOOL = "tool"
PROBE_REPLY = {"role": TOOL, "content": "42"}


class MultiTurnSampler:
    """Wraps a sampler: after each policy turn, appends the environment's reply and continues."""

    def __init__(
        self,
        sampler: Sampler,
        encoder: PromptEncoder,
        reply: EnvironmentReply,
        *,
        window: int | None,
    ) -> None:
        self._sampler = sampler
        self._encoder = encoder
        self._reply = reply
        self._window = window
        self._checked: set[str] = set()

    def load(self, weights: Weights) -> LoadResult:
        """Load weights; return the fingerprint of the weights now in use."""
        return self._sampler.load(weights)

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt once all conversations of the step are finished."""
        for prompt in prompts:
            self._check_template(prompt, PROBE_REPLY)
        groups = list(self._sampler.sample(prompts, step=step))
        ended = self._run_conversations([rollout for group in groups for rollout in group], step)
        for group in groups:
            yield [next(ended) for _ in group]

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its last segment, with environment replies."""
        return list(self._run_conversations(self._sampler.extend(rollouts, step=step), step))

    def greedy(self) -> "MultiTurnSampler":
        """Return a sampler of the most likely conversation of each prompt, on the same weights."""
        return MultiTurnSampler(
            self._sampler.greedy(), self._encoder, self._reply, window=self._window
        )

    def sleep(self) -> None:
        """Release the GPU memory of the wrapped sampler until the next `load`."""
        release_sampler_memory(self._sampler)

    def close(self) -> None:
        """Close the wrapped sampler."""
        self._sampler.close()

    def _run_conversations(self, rollouts: list[Rollout], step: int) -> Iterator[Rollout]:
        active = list(range(len(rollouts)))
        while active:
            for index in active:
                rollouts[index] = self._append_reply(rollouts[index])
            active = [index for index in active if _awaits_policy(rollouts[index])]
            extended = self._sampler.extend([rollouts[index] for index in active], step=step)
            for index, rollout in zip(active, extended, strict=True):
                rollouts[index] = rollout
        return iter(rollouts)

    def _append_reply(self, rollout: Rollout) -> Rollout:
        """Return the rollout with a reply appended, or unchanged if the conversation is over."""
        reply = self._call_reply(rollout) if rollout.finish_reason == "stop" else None
        if reply is None:
            return rollout
        prompt = rollout.prompt
        self._check_template(prompt, reply)
        assert prompt.messages is not None  # noqa: S101 - checked before sampling
        ids = self._encoder.encode_between_turns(
            [*prompt.messages, *rollout.messages],
            reply,
            end_id=int(rollout.token_ids[-1]),
            tools=prompt.columns.get("tools"),
        )
        length = len(prompt.token_ids) + len(rollout.token_ids) + len(ids)
        if self._window is not None and length >= self._window:
            return replace(rollout, finish_reason="length")  # no room left to continue
        segment = Segment(
            token_ids=np.array(ids, dtype=np.int64),
            emitted_by=EmittedBy.TOOL,
            logp_sampler=None,
            weight_version=rollout.segments[-1].weight_version,
        )
        return replace(
            rollout,
            segments=(*rollout.segments, segment),
            messages=(*rollout.messages, reply),
        )

    def _call_reply(self, rollout: Rollout) -> Message | None:
        messages = [dict(m) for m in (*(rollout.prompt.messages or ()), *rollout.messages)]
        try:
            with guard_process("sampling.reply"):
                reply = self._reply(messages, **rollout.prompt.columns)
        except (KeyboardInterrupt, KlinicError):
            raise
        except BaseException as error:  # user code may raise anything
            raise FunctionError(
                f"sampling.reply failed on completion {rollout.sample} of row "
                f"{rollout.prompt.index + 1}: {type(error).__name__}: {error_text(error)}. It is "
                f"called as reply(messages, {', '.join(rollout.prompt.columns)}) and must return "
                "text, a message, or None to end the conversation."
            ) from error
        return _to_message(reply)

    def _check_template(self, prompt: Prompt, reply: Message) -> None:
        """Raise, once per role, if the chat template rewrites earlier turns."""
        if prompt.messages is None:
            raise ConfigError(
                "sampling.reply needs chat prompts, but `prompt` is plain text, which has no chat "
                "template to mark the end of a turn. Write prompts as messages: "
                '[{"role": "user", "content": "..."}].'
            )
        if reply["role"] not in self._checked:
            self._encoder.check_history(prompt.messages, reply, prompt.columns.get("tools"))
            self._checked.add(reply["role"])


def _awaits_policy(rollout: Rollout) -> bool:
    """Return whether a reply was the last, and was not cut off by a limit of tokens."""
    return rollout.segments[-1].emitted_by is EmittedBy.TOOL and rollout.finish_reason != "length"


def _to_message(reply: Any) -> Message | None:
    if reply is None:
        return None
    if isinstance(reply, str):
        return {"role": TOOL, "content": reply}
    if (
        isinstance(reply, Mapping)
        and isinstance(reply.get("role"), str)
        and isinstance(reply.get("content"), str)
        and reply["role"] != "assistant"
    ):
        return dict(reply)
    raise FunctionError(
        f"sampling.reply returned {reply!r:.80}: return text, a message with `role` and `content` "
        "(any role but assistant, which is the policy), or None to end the conversation."
    )
