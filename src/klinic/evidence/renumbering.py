"""Renumbers the token ids of records, so that they no longer stand for texts.

Checks compare ids within the completions of one prompt, compare whole batches, and compare ids with
the special ones of run.json and with the size of the vocabulary. Only that is preserved: the ids
of each prompt and its completions get numbers that a random key and their content decide. One id
has another number in every group, so its frequency over the run does not identify it, equal batches
stay equal, and different prompts stay different as far as the vocabulary allows.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from klinic.evidence.record import StepRecord, entry_indices

NUM_UNKNOWN = 1 << 20  # size of a vocabulary that is not recorded
MOST_TRIES = 16  # numberings of a group, until its prompt differs from every other one


class TokenRenumbering:
    """Replaces token ids; special ids have one number in the whole run."""

    def __init__(self, special_ids: Iterable[int], vocabulary_size: int | None) -> None:
        self._size = NUM_UNKNOWN if vocabulary_size is None else vocabulary_size
        self._is_size_known = vocabulary_size is not None
        self._key = secrets.token_bytes(32)  # never written
        self._global: dict[int, int] = {}
        """Numbers of special ids, and of ids outside the vocabulary, which are faults."""
        self._num_special = self._num_above = self._num_below = 0
        self._content_of_prompt: dict[bytes, bytes] = {}
        """Digest of the group with a renumbered prompt, by the digest of that prompt."""
        for token_id in dict.fromkeys(special_ids):
            if 0 <= token_id < self._size:
                self._global[token_id] = self._num_special
                self._num_special += 1

    def special_id(self, token_id: int) -> int:
        """Return the number of a special id, or of one outside the vocabulary."""
        if token_id not in self._global:
            if token_id < 0:
                self._num_below += 1
                self._global[token_id] = -self._num_below
            else:
                self._global[token_id] = self._size + self._num_above
                self._num_above += 1
        return self._global[token_id]

    def renumber(self, record: StepRecord) -> StepRecord:
        """Return the record with other token ids."""
        prompt_ids, prompt_offsets = np.zeros(0, np.int64), np.zeros(record.num_rows + 1, np.int64)
        if record.prompt_ids is not None and record.prompt_offsets is not None:
            prompt_ids, prompt_offsets = record.prompt_ids, record.prompt_offsets
        ids = np.concatenate([prompt_ids, record.token_ids]).astype(np.int64)
        renumbered = np.empty_like(ids)
        for rows in _rows_of_groups(record):
            prompts, _ = entry_indices(prompt_offsets, rows)
            completions, _ = entry_indices(record.row_offsets, rows)
            within = np.concatenate([prompts, prompt_ids.size + completions])
            renumbered[within] = self._renumber_group(ids[within], prompts.size)
        prompts, completions = np.split(renumbered, [prompt_ids.size])
        return replace(
            record,
            token_ids=completions,
            prompt_ids=None if record.prompt_ids is None else prompts,
        )

    def _renumber_group(self, ids: np.ndarray, num_prompt_ids: int) -> np.ndarray:
        """Return the new ids of one prompt, which come first, and of its completions."""
        values, index = np.unique(ids, return_inverse=True)
        is_global = (values < 0) | np.isin(values, list(self._global))
        if self._is_size_known:
            is_global |= values >= self._size
        numbers = np.zeros(values.size, np.int64)
        for position in np.flatnonzero(is_global):
            numbers[position] = self.special_id(int(values[position]))
        content = hmac.digest(self._key, ids.tobytes(), hashlib.sha256)
        for number in range(MOST_TRIES):
            numbers[~is_global] = self._draw_numbers(content, number, int((~is_global).sum()))
            renumbered: np.ndarray = numbers[index.reshape(-1)]
            if not num_prompt_ids or self._is_prompt_free(renumbered[:num_prompt_ids], content):
                break
        return renumbered

    def _draw_numbers(self, content: bytes, number: int, count: int) -> np.ndarray:
        """Return as many different numbers that are not special; content and key decide them."""
        digest = hmac.digest(self._key, content + bytes([number]), hashlib.sha256)
        random = np.random.default_rng(int.from_bytes(digest, "big"))
        num_free = max(self._size - self._num_special, count)
        return self._num_special + random.choice(num_free, size=count, replace=False)

    def _is_prompt_free(self, prompt: np.ndarray, content: bytes) -> bool:
        """Whether no group with other content has this prompt; remembers the group's content."""
        key = hashlib.sha256(prompt.tobytes()).digest()
        return self._content_of_prompt.setdefault(key, content) == content


def _rows_of_groups(record: StepRecord) -> list[np.ndarray]:
    """Return the rows of each group."""
    order = np.argsort(record.group, kind="stable")
    starts = np.flatnonzero(np.diff(record.group[order])) + 1
    return np.split(order, starts) if order.size else []
