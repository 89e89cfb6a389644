"""Completions without token ids: each character of a text is one token.

Such records have rewards, groups and advantages, and show which completions are equal. run.json
says `token_ids: characters`.
"""

import json
from typing import Any

import numpy as np

from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.rows import DumpRow

MOST_CHARACTERS = 1 << 27  # of a step


def text_of(value: Any) -> str:
    """Return a text, or a chat as one: JSON, so that equal chats have equal texts."""
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


def text_row(prompt: str, completion: str) -> DumpRow:
    """Return the row of two texts.

    >>> text_row("hi", "ab").token_ids.tolist()
    [97, 98]
    """
    ids = _character_codes(completion)
    return DumpRow(
        prompt_ids=_character_codes(prompt), token_ids=ids, loss_mask=np.ones(len(ids), np.bool_)
    )


def answer_text(value: Any) -> str:
    """Return the answer of a dataset; "" for a value that is no single answer.

    >>> answer_text(42), answer_text("42"), answer_text(None), answer_text(["42"])
    ('42', '42', '', '42')
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if isinstance(value, str) else str(value) if is_number else ""


def refuse_long_step(num_characters: int, where: str) -> None:
    """Raise `EvidenceError` if the texts of a step do not fit in memory as tokens."""
    if num_characters > MOST_CHARACTERS:
        raise EvidenceError(
            f"{where}: the texts of a step have {num_characters:,} characters, and the limit is "
            f"{MOST_CHARACTERS:,}. Dump fewer completions per step."
        )


def _character_codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)
