"""The last generations of samples, and the join of trained rows to them by their token ids.

A loop may sample ahead: then the rows of a step belong to an older generation than the newest.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from klinic.evidence.row_join import row_key
from klinic.evidence.sample_pool import JoinedSamples, SamplePool, join_samples

MIN_GENERATIONS, MAX_GENERATIONS = 4, 8


class SampleHistory:
    """Generations of samples, the newest last; a generation ends with the first step after it."""

    def __init__(self, max_version_lag: int | None) -> None:
        num = 2 + (max_version_lag or 0)
        self._pools: deque[SamplePool] = deque(
            maxlen=min(max(num, MIN_GENERATIONS), MAX_GENERATIONS)
        )
        self._is_newest_open = False
        self._is_newest_joined = False

    def __bool__(self) -> bool:
        return bool(self._pools)

    @property
    def num_updates(self) -> int:
        """Earlier updates on the generation of the joined rows; 0 if it is not the newest."""
        return self._pools[-1].num_updates if self._is_newest_joined else 0

    def open_generation(self) -> SamplePool:
        """Return the newest generation to add samples to; a new one after a step."""
        if not self._is_newest_open:
            self._pools.append(SamplePool())
            self._is_newest_open = True
        return self._pools[-1]

    def end_step(self) -> None:
        """Count the update on the joined rows; later samples begin a new generation."""
        self._is_newest_open = False
        if self._pools:
            self._pools[-1].num_updates += self._is_newest_joined

    def join(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[np.ndarray],
        advantage: np.ndarray | None,
        *,
        version_shift: int,
    ) -> JoinedSamples:
        """Return the samples of the rows of a step."""
        pool_of_row = self._assign_rows(prompts, completions)
        used = sorted(set(pool_of_row.tolist()))
        self._is_newest_joined = used == [len(self._pools) - 1]
        rows_by_pool = [np.flatnonzero(pool_of_row == number) for number in used]
        parts = [
            join_samples(
                self._pools[number],
                [prompts[row] for row in rows],
                [completions[row] for row in rows],
                None if advantage is None else advantage[rows],
                version_shift=version_shift,
            )
            for number, rows in zip(used, rows_by_pool, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return _merge_parts(parts, rows_by_pool, [len(ids) for ids in completions])

    def _assign_rows(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return for each row the index of its generation.

        It is the one that sampled most of these rows, or most of their prompts, among those that
        sampled the row; of equal ones the newest.
        """
        if len(self._pools) == 1:
            return np.zeros(len(prompts), np.int64)
        keys = [row_key(*row) for row in zip(prompts, completions, strict=True)]
        contexts = [prompt.tobytes() for prompt in prompts]
        has_key = _find_members(keys, [set(pool.keys) for pool in self._pools])
        has_prompt = _find_members(contexts, [pool.contexts for pool in self._pools])
        scores = [(has_key[n].sum(), has_prompt[n].sum(), n) for n in range(len(self._pools))]
        order = np.array([number for *_, number in sorted(scores, reverse=True)])
        by_key, by_prompt = has_key[order], has_prompt[order]
        first = np.where(by_key.any(0), by_key.argmax(0), by_prompt.argmax(0))
        return np.asarray(order[first])


def _find_members(keys: Sequence[bytes], sets: Sequence[set[bytes]]) -> np.ndarray:
    return np.array([[key in members for key in keys] for members in sets], np.bool_)


def _merge_parts(
    parts: Sequence[JoinedSamples], rows_by_part: Sequence[np.ndarray], lengths: Sequence[int]
) -> JoinedSamples:
    """Return the samples of rows from several generations, in the order of the rows."""
    order = np.argsort(np.concatenate(rows_by_part))
    sizes = np.array(lengths)[np.concatenate(rows_by_part)]
    shift = 1 + max((int(p.group.max(initial=0)) for p in parts if p.group is not None), default=0)
    parts = [
        part if part.group is None else replace(part, group=part.group + number * shift)
        for number, part in enumerate(parts)
    ]
    values = {f.name: [getattr(part, f.name) for part in parts] for f in fields(JoinedSamples)}
    merged: dict[str, Any] = {}
    for name, found in values.items():
        if any(value is None for value in found):
            merged[name] = None
        elif isinstance(found[0], int):
            merged[name] = sum(found)
        elif len(flat := np.concatenate(found)) == len(sizes):
            merged[name] = flat[order]
        else:
            rows = np.split(flat, np.cumsum(sizes)[:-1])
            merged[name] = np.concatenate([rows[row] for row in order])
    return JoinedSamples(**merged)
