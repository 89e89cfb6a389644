"""Renumbers the token ids of records, so that they no longer stand for texts.

Checks compare ids within the completions of one prompt, compare whole batches, and compare ids with
the special ones of run.json and with the size of the vocabulary. Only that is preserved: the ids
of each prompt and its completions are numbered by first appearance, from a start that a random key
and their content decide. One id has another number in every group, so its frequency over the run
does not identify it, and equal batches stay equal.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from klinic.evidence.record import StepRecord, entry_indices

NUM_UNKNOWN = 1 << 20  # size of a vocabulary that is not recorded


class TokenRenumbering:
    """Replaces token ids; special ids have one number in the whole run."""

    def __init__(self, special_ids: Iterable[int], vocabulary_size: int | None) -> None:
        self._size = NUM_UNKNOWN if vocabulary_size is None else vocabulary_size
        self._is_size_known = vocabulary_size is not None
        self._key = secrets.token_bytes(32)  # never written
        self._global: dict[int, int] = {}
        """Numbers of special ids, and of ids outside the vocabulary, which are faults."""
        self._num_special = self._num_above = self._num_below = 0
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
            renumbered[within] = self._renumber_group(ids[within])
        prompts, completions = np.split(renumbered, [prompt_ids.size])
        return replace(
            record,
            token_ids=completions,
            prompt_ids=None if record.prompt_ids is None else prompts,
        )

    def _renumber_group(self, ids: np.ndarray) -> np.ndarray:
        """Return the new ids of one prompt and its completions."""
        values, firsts, index = np.unique(ids, return_index=True, return_inverse=True)
        is_global = (values < 0) | np.isin(values, list(self._global))
        if self._is_size_known:
            is_global |= values >= self._size
        digest = hmac.digest(self._key, ids.tobytes(), hashlib.sha256)
        num_free = max(self._size - self._num_special, 1)
        start = int.from_bytes(digest[:8], "big") % num_free
        order = np.argsort(np.where(is_global, ids.size, firsts), kind="stable")
        appearance = np.empty(values.size, np.int64)
        appearance[order] = np.arange(values.size)
        numbers = self._num_special + (start + appearance) % num_free
        for position in np.flatnonzero(is_global):
            numbers[position] = self.special_id(int(values[position]))
        renumbered: np.ndarray = numbers[index.reshape(-1)]
        return renumbered


def _rows_of_groups(record: StepRecord) -> list[np.ndarray]:
    """Return the rows of each group."""
    order = np.argsort(record.group, kind="stable")
    starts = np.flatnonzero(np.diff(record.group[order])) + 1
    return np.split(order, starts) if order.size else []
