"""Chats as token ids: templated once, and grown only at the end.

A chat prompt goes through the model's template once. What the policy then says is kept as the ids
it sampled, and never goes through the template: where a tool answers, the template is asked what
stands between a placeholder for what was said and the next turn of the policy, and only that is
encoded. This is right where a longer chat begins with the shorter one. A template that rewrites
history (drops earlier thoughts, moves a system message) is refused: tokens would be scored behind
others than those they were sampled behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from klinic.errors import ConfigError, DataError
from klinic.evidence.rollout import Message

SAID = "klinic stands for what was said"
PROBES = (SAID, f"<think>\n{SAID}\n</think>\n\n{SAID}")
"""Turns that a template might rewrite: it must give both back as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt as the model reads it."""

    text: str
    token_ids: list[int]
    messages: tuple[Message, ...] | None
    """The chat it was made of; None for a plain text."""


class PromptEncoder:
    """From prompts, texts or chats, to token ids of one model."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    def __call__(self, prompt: str | Sequence[Message], tools: Any = None) -> Encoded:
        """Return a prompt as ids: a text as the tokenizer begins texts, a chat by its template."""
        if isinstance(prompt, str):
            return Encoded(text=prompt, token_ids=self._tokenizer.encode(prompt), messages=None)
        messages = tuple(plain(message) for message in prompt)
        text = self.render(messages, tools)
        return Encoded(text=text, token_ids=self.encode(text), messages=messages)

    def encode(self, text: str) -> list[int]:
        """Return ids of text that holds its special tokens already."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Return a chat as text, up to where the policy speaks next."""
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"`prompt` is a chat, and the tokenizer of {self._name} has no chat template. Use "
                "a model that was trained on chats, or write prompts as text."
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tools=tools, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise DataError(
                f"the chat template of {self._name} refuses a chat of {roles}: {error}. Mend the "
                "messages, or use a model whose template takes them."
            ) from error
        return text

    def bridge(
        self, before: Sequence[Message], reply: Message, *, behind: int, tools: Any = None
    ) -> list[int]:
        """Return the ids between what the policy said last, ending in `behind`, and its next turn.

        What it said may be anything: it does not go through the template.
        """
        hidden = [_placeholder(m) for m in before]
        start = self.render(hidden[:-1], tools) + SAID
        whole = self.render([*hidden, reply], tools)
        self._refuse_rewriting(whole, start)
        between = whole.removeprefix(start)
        ended: str = self._tokenizer.decode([behind])  # the end of the turn, which it has sampled
        return self.encode(between.removeprefix(ended))

    def check_history(self, messages: Sequence[Message], reply: Message, tools: Any = None) -> None:
        """Refuse a template under which a chat that grows does not begin with what it was."""
        start = self.render(messages, tools)
        for said in PROBES:
            turn = {"role": "assistant", "content": said}
            once = self.render([*messages, turn, reply], tools)
            self._refuse_rewriting(once, start + said)
            self._refuse_rewriting(
                self.render([*messages, turn, reply, turn, reply], tools), once + said
            )

    def _refuse_rewriting(self, whole: str, start: str) -> None:
        if whole.startswith(start):
            return
        same = next(i for i, (a, b) in enumerate(zip(start, whole + "\0", strict=False)) if a != b)
        raise ConfigError(
            f"the chat template of {self._name} rewrites history: with a reply behind it, "
            f"...{start[same : same + 60]!r} becomes ...{whole[same : same + 60]!r}. Tokens would "
            "be scored behind others than those they were sampled behind. Use a template under "
            "which a chat only grows at its end, or train single turns (no sampling.reply)."
        )


def plain(message: Message) -> dict[str, Any]:
    """Return a message without the keys that a table fills with nothing."""
    return {key: value for key, value in message.items() if value is not None}


def _placeholder(message: Message) -> Mapping[str, Any]:
    return {**message, "content": SAID} if message["role"] == "assistant" else message
