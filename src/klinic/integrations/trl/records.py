"""Builds the record of a step from TRL's padded micro-batches.

TRL pads prompts on the left and completions on the right, shuffles the rows of a generation and
splits them into micro-batches. An added column of row numbers, which TRL passes through, identifies
the row of the generation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from klinic.evidence.record import EmittedBy, Fact, StepRecord
from klinic.evidence.rollout import end_to_end, offsets_of
from klinic.integrations.trl.drawn import Drawn, Rewarded
from klinic.integrations.trl.scoring import reference_logp, trained_on

ROW = "klinic_row"
"""The column of row numbers in TRL's batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A micro-batch with its loss and the outputs of its forward pass."""

    inputs: Mapping[str, Any]
    """The inputs of TRL's loss."""
    logp: Tensor
    entropy: Tensor | None
    loss: Tensor
    drawn: Drawn
    rewarded: Rewarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trained row: its index in the micro-batch and in the generation."""

    batch: Trained
    at: int
    number: int
    length: int

    def tokens(self, name: str, values: Any) -> np.ndarray:
        """Return the row's part of a padded array, one entry per token."""
        part = np.asarray(values[self.at])[: self.length]
        if len(part) < self.length:  # the trained row is shorter than the sampled one
            raise ValueError(f"{name} has {len(part)} tokens of {self.length}")
        return part


def to_record(
    step: int,
    batches: Sequence[Trained],
    *,
    eos_ids: Sequence[int],
    facts: Mapping[str, Fact],
    round_trip: Callable[[list[int]], bool] | None = None,
) -> StepRecord:
    """Return the micro-batches of an update as one record.

    `round_trip` returns whether decoding and encoding reproduces token ids; None skips this test.
    """
    arrays = {id(batch): _on_cpu(batch) for batch in batches}
    rows = [row for batch in batches for row in _rows(batch, arrays[id(batch)])]
    rows.sort(key=lambda row: row.number)  # generation order: members of a group are adjacent

    def flat(name: str) -> Any:
        if any(arrays[id(row.batch)].get(name) is None for row in rows):
            return None
        return np.concatenate([row.tokens(name, arrays[id(row.batch)][name]) for row in rows])

    def of_rows(pick: Callable[[Row], Any], dtype: Any) -> np.ndarray:
        return np.array([pick(row) for row in rows], dtype)

    prompts = [_prompt(row, arrays[id(row.batch)]) for row in rows]
    group = of_rows(lambda row: row.batch.rewarded.group[row.number], np.int64)
    numbers = np.unique(group, return_inverse=True)[1].astype(np.int64)
    return StepRecord(
        step=step,
        group=numbers,
        sample=_samples(numbers),
        row_offsets=offsets_of([row.length for row in rows]),
        prompt_offsets=offsets_of([len(prompt) for prompt in prompts]),
        prompt_ids=end_to_end(prompts, np.int64),
        prompt_ids_match=_prompts_match(rows, prompts),
        cached_tokens=_cached_tokens(rows),
        round_trip=None if round_trip is None else _round_trips(rows, round_trip),
        finish_reason=of_rows(lambda row: _ended(row, eos_ids), np.str_),
        reward=of_rows(lambda row: row.batch.rewarded.total[row.number], np.float64),
        reward_parts={
            name: of_rows(lambda row, name=name: row.batch.rewarded.parts[name][row.number], float)  # type: ignore[misc]
            for name in rows[0].batch.rewarded.parts
        },
        advantage=_advantages(rows, arrays),
        token_ids=flat("completion_ids"),
        loss_mask=flat("loss_mask"),
        emitted_by=end_to_end((row.batch.drawn.emitted_by[row.number] for row in rows), np.int8),
        logp_sampler=_reported(rows),
        logp=flat("logp"),
        logp_old=flat("logp_old"),
        logp_ref=flat("logp_ref"),
        entropy=flat("entropy"),
        weight_version=end_to_end(
            (np.full(row.length, row.batch.drawn.version) for row in rows), np.int64
        ),
        facts=facts,
    )


def _on_cpu(batch: Trained) -> dict[str, np.ndarray | None]:
    """Return the arrays of a micro-batch; without old log-probs, the current ones serve as them."""
    inputs = batch.inputs
    old = inputs.get("old_per_token_logps")
    advantages = inputs["advantages"]
    found = {
        "number": inputs[ROW],
        "completion_ids": inputs["completion_ids"],
        "loss_mask": trained_on(inputs),
        "prompt_ids": inputs["prompt_ids"],
        "prompt_mask": inputs["prompt_mask"].bool(),
        "advantages": advantages if advantages.dim() == 1 else None,
        "logp": batch.logp,
        "logp_old": batch.logp if old is None else old,
        "logp_ref": reference_logp(inputs),
        "entropy": batch.entropy,
    }
    return {name: None if x is None else _array(x) for name, x in found.items()}


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    array: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    return array


def _rows(batch: Trained, arrays: Mapping[str, np.ndarray | None]) -> list[Row]:
    numbers, ids = arrays["number"], arrays["completion_ids"]
    assert numbers is not None  # noqa: S101 - always there
    assert ids is not None  # noqa: S101
    return [
        Row(
            batch=batch,
            at=at,
            number=int(number),
            length=min(len(batch.drawn.completion_ids[number]), ids.shape[1]),
        )
        for at, number in enumerate(numbers)
    ]


def _prompt(row: Row, arrays: Mapping[str, np.ndarray | None]) -> np.ndarray:
    ids, mask = arrays["prompt_ids"], arrays["prompt_mask"]
    assert ids is not None  # noqa: S101 - always there
    assert mask is not None  # noqa: S101
    prompt: np.ndarray = ids[row.at][mask[row.at]]
    return prompt


def _prompts_match(rows: Sequence[Row], scored: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return for each row whether the sampler received the scored prompt."""
    if any(row.batch.drawn.sent is None for row in rows):
        return None
    sent = [row.batch.drawn.sent[row.number] for row in rows]  # type: ignore[index]
    pads = [row.batch.drawn.pad_id for row in rows]
    return np.array(list(map(_is_prompt, sent, scored, pads)), np.bool_)


def _is_prompt(sent: np.ndarray, prompt: np.ndarray, pad_id: int | None) -> bool:
    """Return whether the sent tokens are the prompt with at most padding on its left.

    >>> two = np.array([7, 8])
    >>> [_is_prompt(np.array(ids), two, 0) for ids in ([7, 8], [0, 0, 7, 8], [5, 7, 8], [8])]
    [True, True, False, False]
    >>> _is_prompt(np.array([0, 7, 8]), two, None)
    False
    """
    num = max(len(sent) - len(prompt), 0)
    return np.array_equal(sent[num:], prompt) and bool((sent[:num] == pad_id).all())


def _cached_tokens(rows: Sequence[Row]) -> np.ndarray | None:
    cached = [row.batch.drawn.cached_tokens for row in rows]
    if any(told is None for told in cached):
        return None
    return np.array([told[row.number] for told, row in zip(cached, rows, strict=True)], np.int64)  # type: ignore[index]


def _ended(row: Row, eos_ids: Sequence[int]) -> str:
    ids = row.batch.drawn.completion_ids[row.number]
    return "stop" if len(ids) and int(ids[-1]) in eos_ids else "length"


def _round_trips(rows: Sequence[Row], round_trip: Callable[[list[int]], bool]) -> np.ndarray:
    said = [_by_policy(row.batch.drawn, row.number) for row in rows]
    return np.array([all(round_trip(ids) for ids in parts) for parts in said], np.bool_)


def _by_policy(drawn: Drawn, number: int) -> list[list[int]]:
    """Return the runs of consecutive tokens that the policy emitted in a row."""
    own = drawn.emitted_by[number] == EmittedBy.POLICY
    parts = np.split(drawn.completion_ids[number], np.flatnonzero(np.diff(own)) + 1)
    return [part.tolist() for part in parts[0 if own[:1].all() else 1 :: 2]]


def _advantages(
    rows: Sequence[Row], arrays: Mapping[int, Mapping[str, np.ndarray | None]]
) -> np.ndarray | None:
    found = [arrays[id(row.batch)]["advantages"] for row in rows]
    if any(values is None for values in found):
        return None
    return np.array([v[row.at] for v, row in zip(found, rows, strict=True)], np.float32)  # type: ignore[index]


def _reported(rows: Sequence[Row]) -> np.ndarray | None:
    if any(row.batch.drawn.logp_sampler is None for row in rows):
        return None
    return np.concatenate(
        [row.batch.drawn.logp_sampler[row.number][: row.length] for row in rows]  # type: ignore[index]
    )


def _samples(group: np.ndarray) -> np.ndarray:
    """Return the index of each row within its group."""
    seen: dict[int, int] = {}
    counted = []
    for number in group.tolist():
        seen[number] = seen.get(number, -1) + 1
        counted.append(seen[number])
    return np.array(counted, np.int64)


def num_empty(batches: Sequence[Trained]) -> int:
    """Return the number of micro-batches without a trained token."""
    return sum(not bool(batch.inputs["completion_mask"].any()) for batch in batches)
