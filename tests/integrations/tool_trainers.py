"""TRL trainers whose policy calls tools: a conversation of sums, by TRL's own loop.

The chat template writes a turn as the warm start has learnt it: `2+10=` is answered by `12` and an
end token, and a call of the tool asks for the next sum: `3+11=`.
"""

import random
from pathlib import Path
from typing import Any

from integrations.trainers import PROMPTS, characters, make_trainer
from klinic.model.tiny import tiny_tokenizer

LONGEST = 40
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments }}{% endfor %}<|eos|>{% elif message.role == 'tool' %}"
    " ;{{ message.content }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def next_sum(number: int) -> str:
    """Ask for another sum.

    Args:
        number: The last answer.
    """
    return f"{number % 7 + 2}+{number % 5 + 10}"


class Sums:
    """An environment that asks for sums; `reset` leaves the prompt as it is."""

    def __init__(self) -> None:
        self.num_calls = 0

    def reset(self, **_: Any) -> str | None:
        self.num_calls = 0
        return None

    def next_sum(self, number: int) -> str:
        """Ask for another sum.

        Args:
            number: The last answer.
        """
        self.num_calls += 1
        return next_sum(number)


class RandomSums(Sums):
    """An environment whose first observation differs between the members of a group."""

    def reset(self, **how: Any) -> str | None:
        super().reset(**how)
        return f"+{random.randrange(1000)}"  # noqa: S311 - not a secret


def characters_of_turns(completions: Any, **_: Any) -> list[float]:
    """Something to learn, from all messages of an episode."""
    return characters(["".join(str(turn.get("content")) for turn in row) for row in completions])


def tool_tokenizer() -> Any:
    """Return the tiny tokenizer with a template for tools; an ended answer calls the tool."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = "every answer that ended is a call"

    def parse_response(ids: list[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if ids[-1] == tokenizer.eos_token_id and text.isdigit():
            call = {"name": "next_sum", "arguments": {"number": int(text)}}
            answer["tool_calls"] = [{"type": "function", "function": call}]
        return answer

    tokenizer.parse_response = parse_response
    return tokenizer


def make_tool_trainer(start: Path, output: Path, **settings: Any) -> Any:
    """Return a trainer whose policy answers sums for several turns."""
    how = {
        "max_completion_length": LONGEST,
        "max_tool_calling_iterations": 2,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "processing_class": tool_tokenizer(),
        "reward": characters_of_turns,
        "prompts": [[{"role": "user", "content": text.removesuffix("=")}] for text in PROMPTS],
        **settings,
    }
    if "environment_factory" not in how:
        how.setdefault("tools", [next_sum])
    return make_trainer(start, output, **how)
