"""Several turns: the policy speaks, a function answers as a tool would, the policy goes on.

Tokens of the answer, and of the template around it, are marked as the tool's and not trained on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.errors import ConfigError, FunctionError, KlinicError, text_of
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Message, Prompt, Rollout, Segment
from klinic.model.chat import PromptEncoder
from klinic.model.weights import Weights
from klinic.sampler.protocol import Loaded, Sampler
from klinic.user_code import guard

Reply = Callable[..., Any]
"""`reply(messages, **columns)`: text, a message, or None where the chat is over."""
TOOL = "tool"
PROBE = {"role": TOOL, "content": "42"}


class Conversing:
    """A sampler whose completions are answered until there is no more to say."""

    def __init__(
        self, sampler: Sampler, encoder: PromptEncoder, reply: Reply, *, window: int | None
    ) -> None:
        self._sampler = sampler
        self._encoder = encoder
        self._reply = reply
        self._window = window
        self._checked: set[str] = set()

    def load(self, weights: Weights) -> Loaded:
        """Take over weights; say what is really in use now."""
        return self._sampler.load(weights)

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt when all chats of the step are over."""
        for prompt in prompts:
            self._check(prompt, PROBE)
        groups = list(self._sampler.sample(prompts, step=step))
        ended = self._converse([rollout for group in groups for rollout in group], step)
        for group in groups:
            yield [next(ended) for _ in group]

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Let the policy go on, and be answered, behind the segments of each rollout."""
        return list(self._converse(self._sampler.extend(rollouts, step=step), step))

    def close(self) -> None:
        """Let go of the sampler."""
        self._sampler.close()

    def _converse(self, rollouts: list[Rollout], step: int) -> Iterator[Rollout]:
        places = list(range(len(rollouts)))
        while places:
            for place in places:
                rollouts[place] = self._answered(rollouts[place])
            places = [p for p in places if rollouts[p].segments[-1].emitted_by is EmittedBy.TOOL]
            extended = self._sampler.extend([rollouts[place] for place in places], step=step)
            for place, rollout in zip(places, extended, strict=True):
                rollouts[place] = rollout
        return iter(rollouts)

    def _answered(self, rollout: Rollout) -> Rollout:
        """Return the rollout with an answer behind it, or as it is where the chat is over."""
        reply = self._call(rollout) if rollout.finish_reason == "stop" else None
        if reply is None:
            return rollout
        prompt = rollout.prompt
        self._check(prompt, reply)
        assert prompt.messages is not None  # noqa: S101 - checked before sampling
        ids = self._encoder.bridge(
            [*prompt.messages, *rollout.messages],
            reply,
            behind=int(rollout.token_ids[-1]),
            tools=prompt.columns.get("tools"),
        )
        length = len(prompt.token_ids) + len(rollout.token_ids) + len(ids)
        if self._window is not None and length >= self._window:
            return replace(rollout, finish_reason="length")  # no room to go on behind the answer
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

    def _call(self, rollout: Rollout) -> Message | None:
        messages = [dict(m) for m in (*(rollout.prompt.messages or ()), *rollout.messages)]
        try:
            with guard("sampling.reply"):
                reply = self._reply(messages, **rollout.prompt.columns)
        except (KeyboardInterrupt, KlinicError):
            raise
        except BaseException as error:  # a user's code may raise anything
            raise FunctionError(
                f"sampling.reply failed on completion {rollout.sample} of row "
                f"{rollout.prompt.index + 1}: {type(error).__name__}: {text_of(error)}. It is "
                f"called as reply(messages, {', '.join(rollout.prompt.columns)}) and returns "
                "text, a message, or None where the chat is over."
            ) from error
        return _message(reply)

    def _check(self, prompt: Prompt, reply: Message) -> None:
        """Refuse, once a role, a template that does not keep what was said."""
        if prompt.messages is None:
            raise ConfigError(
                "sampling.reply answers chats, and `prompt` is a text: there is no template that "
                "says where a turn ends. Write prompts as messages: "
                '[{"role": "user", "content": "..."}].'
            )
        if reply["role"] not in self._checked:
            self._encoder.check_history(prompt.messages, reply, prompt.columns.get("tools"))
            self._checked.add(reply["role"])


def _message(reply: Any) -> Message | None:
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
        "(not the assistant's: that is the policy), or None where the chat is over."
    )
