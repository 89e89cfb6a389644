"""Builds the record and the metrics of a step from TRL's padded micro-batches.

TRL pads prompts on the left and completions on the right, shuffles the rows of a generation and
splits them into micro-batches. An added column of row numbers, which TRL passes through, identifies
the row of the generation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from klinic.evidence.metrics import clip_metrics, step_metrics
from klinic.evidence.record import EmittedBy, Fact, StepRecord
from klinic.evidence.rollout import concatenate_arrays, offsets_from_lengths
from klinic.integrations.trl import run_facts
from klinic.integrations.trl.rollouts import GenerationBatch, RewardBatch
from klinic.integrations.trl.scoring import reference_logp, trained_mask

ROW_COLUMN = "klinic_row"
"""The column of row numbers in TRL's batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch with its loss and the outputs of its forward pass."""

    inputs: Mapping[str, Any]
    """The inputs of TRL's loss."""
    logp: Tensor
    entropy: Tensor | None
    loss: Tensor
    generation: GenerationBatch
    rewards: RewardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """A trained row: its index in the micro-batch and in the generation."""

    batch: MicroBatch
    batch_row: int
    generation_row: int
    length: int

    def slice_tokens(self, name: str, values: Any) -> np.ndarray:
        """Return the row's part of a padded array, one entry per token."""
        part = np.asarray(values[self.batch_row])[: self.length]
        if len(part) < self.length:  # the trained row is shorter than the sampled one
            raise ValueError(f"{name} has {len(part)} tokens of {self.length}")
        return part


def build_record(
    step: int,
    batches: Sequence[MicroBatch],
    *,
    eos_ids: Sequence[int],
    facts: Mapping[str, Fact],
    round_trip: Callable[[list[int]], bool] | None = None,
) -> StepRecord:
    """Return the micro-batches of an update as one record.

    `round_trip` returns whether decoding and encoding reproduces token ids; None skips this test.
    """
    arrays = {id(batch): _cpu_arrays(batch) for batch in batches}
    rows = [row for batch in batches for row in _trained_rows(batch, arrays[id(batch)])]
    # generation order: members of a group are adjacent
    rows.sort(key=lambda row: row.generation_row)

    def flat_tokens(name: str) -> Any:
        if any(arrays[id(row.batch)].get(name) is None for row in rows):
            return None
        return np.concatenate([row.slice_tokens(name, arrays[id(row.batch)][name]) for row in rows])

    def per_row(pick: Callable[[TrainedRow], Any], dtype: Any) -> np.ndarray:
        return np.array([pick(row) for row in rows], dtype)

    def row_reward(name: str) -> Callable[[TrainedRow], float | None]:
        return lambda row: row.batch.rewards.by_function[name][row.generation_row]

    rewards = rows[0].batch.rewards.by_function
    prompts = [_prompt_tokens(row, arrays[id(row.batch)]) for row in rows]
    group = per_row(lambda row: row.batch.rewards.group[row.generation_row], np.int64)
    group_ids = np.unique(group, return_inverse=True)[1].astype(np.int64)
    return StepRecord(
        step=step,
        group=group_ids,
        sample=_sample_indices(group_ids),
        row_offsets=offsets_from_lengths([row.length for row in rows]),
        prompt_offsets=offsets_from_lengths([len(prompt) for prompt in prompts]),
        prompt_ids=concatenate_arrays(prompts, np.int64),
        prompt_ids_match=_prompts_match(rows, prompts),
        cached_tokens=_cached_tokens(rows),
        round_trip=None if round_trip is None else _round_trips(rows, round_trip),
        finish_reason=per_row(lambda row: _finish_reason(row, eos_ids), np.str_),
        reward=per_row(lambda row: row.batch.rewards.total[row.generation_row], np.float64),
        reward_parts={name: per_row(row_reward(name), float) for name in rewards},
        advantage=_row_advantages(rows, arrays),
        token_ids=flat_tokens("completion_ids"),
        loss_mask=flat_tokens("loss_mask"),
        emitted_by=concatenate_arrays(
            (row.batch.generation.emitted_by[row.generation_row] for row in rows), np.int8
        ),
        logp_sampler=_sampler_logp(rows),
        logp=flat_tokens("logp"),
        logp_old=flat_tokens("logp_old"),
        logp_ref=flat_tokens("logp_ref"),
        entropy=flat_tokens("entropy"),
        weight_version=concatenate_arrays(
            (np.full(row.length, row.batch.generation.version) for row in rows), np.int64
        ),
        facts=facts,
    )


def _cpu_arrays(batch: MicroBatch) -> dict[str, np.ndarray | None]:
    """Return the arrays of a micro-batch; without old log-probs, the current ones serve as them."""
    inputs = batch.inputs
    logp_old = inputs.get("old_per_token_logps")
    advantages = inputs["advantages"]
    tensors = {
        "number": inputs[ROW_COLUMN],
        "completion_ids": inputs["completion_ids"],
        "loss_mask": trained_mask(inputs),
        "prompt_ids": inputs["prompt_ids"],
        "prompt_mask": inputs["prompt_mask"].bool(),
        "advantages": advantages if advantages.dim() == 1 else None,
        "logp": batch.logp,
        "logp_old": batch.logp if logp_old is None else logp_old,
        "logp_ref": reference_logp(inputs),
        "entropy": batch.entropy,
    }
    return {name: None if x is None else _to_numpy(x) for name, x in tensors.items()}


def _to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    array: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    return array


def _trained_rows(batch: MicroBatch, arrays: Mapping[str, np.ndarray | None]) -> list[TrainedRow]:
    numbers, ids = arrays["number"], arrays["completion_ids"]
    assert numbers is not None  # noqa: S101 - always there
    assert ids is not None  # noqa: S101
    return [
        TrainedRow(
            batch=batch,
            batch_row=at,
            generation_row=int(number),
            length=min(len(batch.generation.completion_ids[number]), ids.shape[1]),
        )
        for at, number in enumerate(numbers)
    ]


def _prompt_tokens(row: TrainedRow, arrays: Mapping[str, np.ndarray | None]) -> np.ndarray:
    ids, mask = arrays["prompt_ids"], arrays["prompt_mask"]
    assert ids is not None  # noqa: S101 - always there
    assert mask is not None  # noqa: S101
    prompt: np.ndarray = ids[row.batch_row][mask[row.batch_row]]
    return prompt


def _prompts_match(rows: Sequence[TrainedRow], scored: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return for each row whether the sampler received the scored prompt."""
    if any(row.batch.generation.sent_prompts is None for row in rows):
        return None
    sent = [row.batch.generation.sent_prompts[row.generation_row] for row in rows]  # type: ignore[index]
    pads = [row.batch.generation.pad_id for row in rows]
    return np.array(list(map(_is_padded_prompt, sent, scored, pads)), np.bool_)


def _is_padded_prompt(sent: np.ndarray, prompt: np.ndarray, pad_id: int | None) -> bool:
    """Return whether the sent tokens are the prompt with at most padding on its left.

    >>> two = np.array([7, 8])
    >>> [_is_padded_prompt(np.array(ids), two, 0) for ids in ([7, 8], [0, 0, 7, 8], [5, 7, 8], [8])]
    [True, True, False, False]
    >>> _is_padded_prompt(np.array([0, 7, 8]), two, None)
    False
    """
    num = max(len(sent) - len(prompt), 0)
    return np.array_equal(sent[num:], prompt) and bool((sent[:num] == pad_id).all())


def _cached_tokens(rows: Sequence[TrainedRow]) -> np.ndarray | None:
    reported = [row.batch.generation.cached_tokens for row in rows]
    if any(counts is None for counts in reported):
        return None
    pairs = zip(reported, rows, strict=True)
    return np.array([counts[row.generation_row] for counts, row in pairs], np.int64)  # type: ignore[index]


def _finish_reason(row: TrainedRow, eos_ids: Sequence[int]) -> str:
    ids = row.batch.generation.completion_ids[row.generation_row]
    return "stop" if len(ids) and int(ids[-1]) in eos_ids else "length"


def _round_trips(rows: Sequence[TrainedRow], round_trip: Callable[[list[int]], bool]) -> np.ndarray:
    segments = [_policy_segments(row.batch.generation, row.generation_row) for row in rows]
    return np.array([all(round_trip(ids) for ids in parts) for parts in segments], np.bool_)


def _policy_segments(generation: GenerationBatch, number: int) -> list[list[int]]:
    """Return the runs of consecutive tokens that the policy emitted in a row."""
    is_policy = generation.emitted_by[number] == EmittedBy.POLICY
    parts = np.split(generation.completion_ids[number], np.flatnonzero(np.diff(is_policy)) + 1)
    return [part.tolist() for part in parts[0 if is_policy[:1].all() else 1 :: 2]]


def _row_advantages(
    rows: Sequence[TrainedRow], arrays: Mapping[int, Mapping[str, np.ndarray | None]]
) -> np.ndarray | None:
    advantages = [arrays[id(row.batch)]["advantages"] for row in rows]
    if any(values is None for values in advantages):
        return None
    return np.array([v[row.batch_row] for v, row in zip(advantages, rows, strict=True)], np.float32)  # type: ignore[index]


def _sampler_logp(rows: Sequence[TrainedRow]) -> np.ndarray | None:
    if any(row.batch.generation.logp_sampler is None for row in rows):
        return None
    return np.concatenate(
        [row.batch.generation.logp_sampler[row.generation_row][: row.length] for row in rows]  # type: ignore[index]
    )


def _sample_indices(group: np.ndarray) -> np.ndarray:
    """Return the index of each row within its group."""
    last_index: dict[int, int] = {}
    counted = []
    for number in group.tolist():
        last_index[number] = last_index.get(number, -1) + 1
        counted.append(last_index[number])
    return np.array(counted, np.int64)


def num_empty_batches(batches: Sequence[MicroBatch]) -> int:
    """Return the number of micro-batches without a trained token."""
    return sum(not bool(batch.inputs["completion_mask"].any()) for batch in batches)


KL_STATISTICS = ("mean", "max", "p99", "share_above")
LOGGED_KL_METRICS = tuple(
    f"kl_{name}/{figure}" for name in ("k1", "k3") for figure in KL_STATISTICS
)
"""KL metrics that TRL's own log gets as well, under `klinic/`."""


def compute_step_metrics(record: StepRecord, args: Any, *, kl_coef: float) -> dict[str, float]:
    """Return every metric of a record, with the keys of klinic's own runs."""
    facts = {name: record.facts.get(name) for name in ("loss", "grad_norm", "learning_rate")}
    metrics = {name: float(value) for name, value in facts.items() if value is not None}
    metrics["kl_coef"] = kl_coef
    rewards = {
        "reward": record.reward,
        **{f"rewards/{name}/mean": part for name, part in record.reward_parts.items()},
    }
    for name, values in rewards.items():
        if values is not None and np.isfinite(values).any():
            metrics[name] = float(np.nanmean(values))
    metrics |= step_metrics(record)
    metrics |= clip_metrics(
        record,
        clip_low=args.epsilon,
        clip_high=run_facts.clip_high(args),
        by_sequence=args.importance_sampling_level == "sequence",
    )
    return metrics


def parse_rate(
    batches: Sequence[MicroBatch], parse: Callable[[str], Any] | None
) -> dict[str, float]:
    """Return the fraction of completions with a parsable answer; empty without `parse`."""
    if parse is None:
        return {}
    rows = [
        (batch.generation, number)
        for batch in batches
        for number in batch.inputs[ROW_COLUMN].tolist()
    ]
    parsed = [parse(generation.texts[number]) is not None for generation, number in rows]
    return {"completions/parse_rate": sum(parsed) / max(len(parsed), 1)}
