"""Encode prompts and chats as token ids; chats are templated once and only ever appended to.

A chat prompt is rendered by the model's template once. The policy's completions keep the ids it
sampled and are never rendered again: when a tool replies, the template is rendered with a
placeholder for each completion, and only the text between the placeholder and the policy's next
turn is encoded. This requires that rendering a longer chat starts with the rendered shorter one. A
template that rewrites history (drops earlier thoughts, moves a system message) is refused: tokens
would be scored in another context than they were sampled in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from klinic.errors import ConfigError, DataError
from klinic.evidence.rollout import Message

PLACEHOLDER = "klinic stands for what was said"
PROBE_COMPLETIONS = (PLACEHOLDER, f"<think>\n{PLACEHOLDER}\n</think>\n\n{PLACEHOLDER}")
"""Completions that a template might rewrite; it must render both unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """An encoded prompt."""

    text: str
    token_ids: list[int]
    messages: tuple[Message, ...] | None
    """The chat it was rendered from; None for plain text."""


class PromptEncoder:
    """Encodes prompts, plain text or chats, for one model."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    def __call__(self, prompt: str | Sequence[Message], tools: Any = None) -> EncodedPrompt:
        """Return a prompt's ids: text with the tokenizer's BOS rule, a chat by its template."""
        if isinstance(prompt, str):
            return EncodedPrompt(
                text=prompt, token_ids=self._tokenizer.encode(prompt), messages=None
            )
        messages = tuple(drop_none_values(message) for message in prompt)
        text = self.render_chat(messages, tools)
        return EncodedPrompt(text=text, token_ids=self.encode_text(text), messages=messages)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return how many ids each text prompt has; together they take a tenth of the time."""
        return [len(ids) for ids in self._tokenizer(list(texts))["input_ids"]]

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of text that already contains its special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render_chat(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Return a chat as text, including the prompt for the next generation."""
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
                f"the chat template of {self._name} rejects a chat of {roles}: {error}. Fix the "
                "messages, or use a model whose template accepts them."
            ) from error
        return text

    def encode_between_turns(
        self, before: Sequence[Message], reply: Message, *, end_id: int, tools: Any = None
    ) -> list[int]:
        """Return the ids between the last completion, whose final id is `end_id`, and the next one.

        The completion itself is not rendered by the template.
        """
        masked = [_mask_completion(m) for m in before]
        start = self.render_chat(masked[:-1], tools) + PLACEHOLDER
        whole = self.render_chat([*masked, reply], tools)
        self._refuse_rewriting(whole, start)
        between = whole.removeprefix(start)
        end_text: str = self._tokenizer.decode([end_id])  # the sampled end of the turn
        return self.encode_text(between.removeprefix(end_text))

    def check_history(self, messages: Sequence[Message], reply: Message, tools: Any = None) -> None:
        """Refuse a template that renders the start of a chat differently once it is longer."""
        start = self.render_chat(messages, tools)
        for completion in PROBE_COMPLETIONS:
            turn = {"role": "assistant", "content": completion}
            once = self.render_chat([*messages, turn, reply], tools)
            self._refuse_rewriting(once, start + completion)
            self._refuse_rewriting(
                self.render_chat([*messages, turn, reply, turn, reply], tools), once + completion
            )

    def _refuse_rewriting(self, whole: str, start: str) -> None:
        if whole.startswith(start):
            return
        first_difference = next(
            i for i, (a, b) in enumerate(zip(start, whole + "\0", strict=False)) if a != b
        )
        raise ConfigError(
            f"the chat template of {self._name} rewrites history: when a reply follows, "
            f"...{start[first_difference : first_difference + 60]!r} becomes "
            f"...{whole[first_difference : first_difference + 60]!r}. Tokens would "
            "be scored in another context than they were sampled in. Use a template that only "
            "appends to a chat, or train single turns (no sampling.reply)."
        )


def drop_none_values(message: Message) -> dict[str, Any]:
    """Return a message without the keys whose value is None."""
    return {key: value for key, value in message.items() if value is not None}


def _mask_completion(message: Message) -> Mapping[str, Any]:
    return {**message, "content": PLACEHOLDER} if message["role"] == "assistant" else message
