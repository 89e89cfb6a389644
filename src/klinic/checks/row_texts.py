"""Texts of the rows of a record whose tokens are characters, as dumps of texts are read."""

import json
from itertools import pairwise

import numpy as np

from klinic.checks.base import Case
from klinic.evidence.record import StepRecord

CHARACTERS = "characters"  # of run.json's `token_ids`


def has_texts(case: Case) -> bool:
    """Return whether each token of this run is a character."""
    return case.run.get("token_ids") == CHARACTERS


def completion_texts(record: StepRecord) -> list[str]:
    """Return the completions. A chat of one message is its content; longer ones are empty.

    Turns of longer chats were kept apart by the trainer, so no text runs on.
    """
    return [_chat_content(text) for text in _decode(record.token_ids, record.row_offsets)]


def prompt_texts(record: StepRecord) -> list[str]:
    """Return the prompts; empty if they were not recorded."""
    if record.prompt_ids is None or record.prompt_offsets is None:
        return []
    return _decode(record.prompt_ids, record.prompt_offsets)


def _decode(codes: np.ndarray, offsets: np.ndarray) -> list[str]:
    spans = pairwise(offsets.tolist())
    raw = np.asarray(codes).astype(np.uint32)
    return [raw[start:end].tobytes().decode("utf-32-le", "surrogatepass") for start, end in spans]


def _chat_content(text: str) -> str:
    """Return the content of a chat of one message that is stored as JSON, else the text.

    >>> _chat_content('[{"content": "4", "role": "assistant"}]')
    '4'
    """
    if not text.startswith("[{"):
        return text
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return text
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    return contents[0] if len(contents) == 1 and isinstance(contents[0], str) else ""
