"""What a completion says, whether it is a text or the turns of a chat."""

from collections.abc import Mapping, Sequence

Completion = str | Sequence[Mapping[str, str]]


def said(completion: Completion) -> str:
    """Return the text, or that of the last turn.

    >>> said([{"role": "assistant", "content": "42"}])
    '42'
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]
