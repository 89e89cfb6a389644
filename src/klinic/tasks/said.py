"""The text of a completion, which is a string or the messages of a chat."""

from collections.abc import Mapping, Sequence

Completion = str | Sequence[Mapping[str, str]]


def said(completion: Completion) -> str:
    """Return the text of a completion: the string, or the content of the last message.

    >>> said([{"role": "assistant", "content": "42"}])
    '42'
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]
