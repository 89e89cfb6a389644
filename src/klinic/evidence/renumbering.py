"""Renumbers the token ids of records, so that they no longer stand for texts.

Checks compare ids within a prompt and its completions, also of several steps, compare whole
prompts, and compare ids with the special ones of run.json and with the size of the vocabulary. Only
that is preserved: the vocabulary is permuted anew for every prompt, by a random key and the prompt.
One id has another number for every prompt, so its frequency over the run does not identify it,
equal prompts and completions stay equal, and different prompts stay different as far as the
vocabulary allows. Where prompts are not recorded, each group is permuted by its content.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from klinic.evidence.record import StepRecord, entry_indices

NUM_UNKNOWN = 1 << 18  # size of a vocabulary that is not recorded: more than tokenizers have
MOST_TRIES = 16  # permutations for a prompt, until it differs from every other one


class TokenRenumbering:
    """Replaces token ids; special ids have one number in the whole run."""

    def __init__(self, special_ids: Iterable[int], vocabulary_size: int | None) -> None:
        self._size = NUM_UNKNOWN if vocabulary_size is None else vocabulary_size
        self._key = secrets.token_bytes(32)  # never written
        self._global: dict[int, int] = {}
        """Numbers of special ids, and of ids outside the vocabulary, which are faults."""
        self._num_special = self._num_above = self._num_below = 0
        self._prompt_of_numbers: dict[bytes, bytes] = {}
        """Digest of a prompt, by the digest of its numbers."""
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
            own = [prompt_ids[prompt_offsets[row] : prompt_offsets[row + 1]] for row in rows]
            numbers = self._numbers_of_prompts(own, ids[within])
            renumbered[within] = self._apply_numbers(numbers, ids[within])
        prompts, completions = np.split(renumbered, [prompt_ids.size])
        return replace(
            record,
            token_ids=completions,
            prompt_ids=None if record.prompt_ids is None else prompts,
        )

    def _numbers_of_prompts(self, prompts: Sequence[np.ndarray], ids: np.ndarray) -> np.ndarray:
        """Return the numbers of all ids for a group's prompts, or for its ids without prompts."""
        different = sorted({np.asarray(prompt, np.int64).tobytes() for prompt in prompts})
        content = b"".join([len(one).to_bytes(8, "big") + one for one in different])
        if not any(different):
            content = ids.tobytes()
        digest = hmac.digest(self._key, content, hashlib.sha256)
        for number in range(MOST_TRIES):
            numbers = self._permute_ids(hmac.digest(digest, bytes([number]), hashlib.sha256))
            renumbered = self._apply_numbers(numbers, np.frombuffer(b"".join(different), np.int64))
            if not renumbered.size or self._is_free(renumbered, digest):
                break
        return numbers

    def _permute_ids(self, seed: bytes) -> np.ndarray:
        """Return a random number for every id; special ids keep theirs."""
        special = [i for i in self._global if 0 <= i < self._size]
        numbers = np.zeros(self._size, np.int64)
        is_free = np.ones(self._size, np.bool_)
        is_free[special] = False
        random = np.random.default_rng(int.from_bytes(seed, "big"))
        free = np.arange(len(special), self._size, dtype=np.int32)
        numbers[is_free] = random.permutation(free)
        numbers[special] = [self._global[i] for i in special]
        return numbers

    def _apply_numbers(self, numbers: np.ndarray, ids: np.ndarray) -> np.ndarray:
        is_known = (ids >= 0) & (ids < self._size)
        renumbered = numbers[np.where(is_known, ids, 0)]
        renumbered[~is_known] = [self.special_id(i) for i in ids[~is_known].tolist()]
        return np.asarray(renumbered)

    def _is_free(self, prompt: np.ndarray, digest: bytes) -> bool:
        """Whether no other prompt has these numbers; remembers them."""
        key = hashlib.sha256(prompt.tobytes()).digest()
        return self._prompt_of_numbers.setdefault(key, digest) == digest


def _rows_of_groups(record: StepRecord) -> list[np.ndarray]:
    """Return the rows of each group."""
    order = np.argsort(record.group, kind="stable")
    starts = np.flatnonzero(np.diff(record.group[order])) + 1
    return np.split(order, starts) if order.size else []
