"""Builds the record and the metrics of a step from TRL's padded micro-batches.

TRL pads prompts on the left and completions on the right, shuffles the rows of a generation and
splits them into micro-batches; `trained_rows.py` finds the row of the generation again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from klinic.evidence.metrics import clip_metrics, logged_metrics
from klinic.evidence.record import EmittedBy, Fact, StepRecord
from klinic.evidence.rollout import concatenate_arrays, offsets_from_lengths
from klinic.integrations.trl import run_facts
from klinic.integrations.trl.rollouts import GenerationBatch
from klinic.integrations.trl.scoring import Batch, reference_logp, trained_mask
from klinic.integrations.trl.trained_rows import (
    ROW_COLUMN,
    BatchIds,
    MicroBatch,
    TrainedRow,
    join_batches,
    join_ids,
)


def build_record(
    step: int,
    batches: Sequence[MicroBatch],
    *,
    eos_ids: Sequence[int],
    facts: Mapping[str, Fact],
    round_trip: Callable[[list[int]], bool] | None = None,
) -> StepRecord:
    """Return the micro-batches of an update as one record, with groups of all processes.

    `round_trip` returns whether decoding and encoding reproduces token ids; None skips this test.
    """
    arrays = {id(batch): _cpu_arrays(batch) for batch in batches}
    ids = [batch_ids(batch.inputs) for batch in batches]
    rows = join_batches(batches, ids)
    # generation order: members of a group are adjacent
    order = _generation_order(batches)
    rows.sort(key=lambda row: (order[id(row.batch.generation)], row.generation_row))

    def flat_tokens(name: str) -> Any:
        if any(arrays[id(row.batch)].get(name) is None for row in rows):
            return None
        return np.concatenate([row.slice_tokens(name, arrays[id(row.batch)][name]) for row in rows])

    def per_row(pick: Callable[[TrainedRow], Any], dtype: Any) -> np.ndarray:
        return np.array([pick(row) for row in rows], dtype)

    def row_reward(name: str) -> Callable[[TrainedRow], float | None]:
        return lambda row: row.batch.rewards.by_function[name][row.generation_row]

    rewards = rows[0].batch.rewards.by_function
    ids_of = dict(zip(map(id, batches), ids, strict=True))
    prompts = [ids_of[id(row.batch)].prompt(row.batch_row) for row in rows]
    return StepRecord(
        step=step,
        group=per_row(lambda row: _row_group(row, order), np.int64),
        sample=per_row(lambda row: row.batch.rewards.sample[row.generation_row], np.int64),
        row_offsets=offsets_from_lengths([row.length for row in rows]),
        prompt_offsets=offsets_from_lengths([len(prompt) for prompt in prompts]),
        prompt_ids=concatenate_arrays(prompts, np.int64),
        prompt_ids_match=_prompts_match(rows, prompts),
        cached_tokens=_cached_tokens(rows),
        round_trip=_round_trips(rows, round_trip),
        finish_reason=per_row(lambda row: _finish_reason(row, eos_ids), np.str_),
        reward=per_row(lambda row: row.batch.rewards.total[row.generation_row], np.float64),
        reward_parts={name: per_row(row_reward(name), float) for name in rewards},
        advantage=_row_advantages(rows, arrays),
        token_advantage=flat_tokens("token_advantages"),
        token_ids=flat_tokens("completion_ids"),
        loss_mask=flat_tokens("loss_mask"),
        emitted_by=_emitted_by(rows),
        logp_sampler=_sampler_logp(rows),
        logp=flat_tokens("logp"),
        logp_old=flat_tokens("logp_old"),
        logp_ref=flat_tokens("logp_ref"),
        entropy=flat_tokens("entropy"),
        weight_version=concatenate_arrays(
            (np.full(row.length, row.batch.generation.version) for row in rows), np.int64
        ),
        facts={**facts, **_join_facts(rows)},
    )


def _generation_order(batches: Sequence[MicroBatch]) -> dict[int, int]:
    """Return the number of each generation of a step, by its id."""
    generations = dict.fromkeys(id(batch.generation) for batch in batches)
    return {generation: number for number, generation in enumerate(generations)}


def _row_group(row: TrainedRow, order: Mapping[int, int]) -> int:
    """Return the group of a row; groups of different generations have different numbers."""
    rewards, number = row.batch.rewards, order[id(row.batch.generation)]
    return number * rewards.num_rows + int(rewards.group[row.generation_row])


def batch_ids(inputs: Batch) -> BatchIds:
    """Return the ids of a micro-batch that identify its rows."""
    advantages = inputs.get("advantages")
    return BatchIds(
        prompt_ids=_to_numpy(inputs["prompt_ids"]),
        prompt_mask=_to_numpy(inputs["prompt_mask"].bool()),
        completion_ids=_to_numpy(inputs["completion_ids"]),
        trained_mask=_to_numpy(trained_mask(inputs)),
        expected=_to_numpy(inputs[ROW_COLUMN]),
        advantages=None if advantages is None or advantages.dim() != 1 else _to_numpy(advantages),
    )


def generation_rows(inputs: Batch, generation: GenerationBatch) -> list[int]:
    """Return the generation's row of each row of a batch; by number if no ids agree."""
    ids = batch_ids(inputs)
    joined = join_ids([ids], generation, None)
    return [int(number) for number in np.where(joined < 0, ids.expected, joined)]


def _join_facts(rows: Sequence[TrainedRow]) -> dict[str, Fact]:
    reencoded = [row.batch.generation.reencoded for row in rows]
    is_known = all(flags is not None for flags in reencoded)
    pairs = zip(reencoded, rows, strict=True)
    rewards = {id(row.batch.rewards): row.batch.rewards for row in rows}.values()
    return {
        "num_split_groups": sum(batch.num_split_groups for batch in rewards),
        "num_reencoded_rows": sum(flags[row.generation_row] for flags, row in pairs)  # type: ignore[index]
        if is_known
        else None,
        "num_moved_rows": sum(row.is_moved for row in rows),
        "num_changed_rows": sum(
            row.is_changed or row.batch.generation.replaced[row.generation_row] for row in rows
        ),
    }


def _cpu_arrays(batch: MicroBatch) -> dict[str, np.ndarray | None]:
    """Return the arrays of a micro-batch; without old log-probs, the current ones serve as them."""
    inputs = batch.inputs
    logp_old = inputs.get("old_per_token_logps")
    advantages = inputs["advantages"]
    tensors = {
        "completion_ids": inputs["completion_ids"],
        "loss_mask": trained_mask(inputs),
        "advantages": advantages if advantages.dim() == 1 else None,
        "token_advantages": advantages if advantages.dim() > 1 else None,
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


def _prompts_match(rows: Sequence[TrainedRow], scored: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return for each row whether the sampler attended to exactly the scored ids."""
    if any(row.batch.generation.sent_prompts is None for row in rows):
        return None
    sent = [row.batch.generation.sent_prompts[row.generation_row] for row in rows]  # type: ignore[index]
    is_elsewhere = [row.batch.generation.is_elsewhere[row.generation_row] for row in rows]
    is_equal = [np.array_equal(*both) for both in zip(sent, scored, strict=True)]
    return np.array(is_equal, np.bool_) & ~np.array(is_elsewhere, np.bool_)


def _cached_tokens(rows: Sequence[TrainedRow]) -> np.ndarray | None:
    reported = [row.batch.generation.cached_tokens for row in rows]
    if any(counts is None for counts in reported):
        return None
    pairs = zip(reported, rows, strict=True)
    return np.array([counts[row.generation_row] for counts, row in pairs], np.int64)  # type: ignore[index]


def _finish_reason(row: TrainedRow, eos_ids: Sequence[int]) -> str:
    ids = row.batch.generation.completion_ids[row.generation_row]
    return "stop" if len(ids) and int(ids[-1]) in eos_ids else "length"


def _round_trips(
    rows: Sequence[TrainedRow], round_trip: Callable[[list[int]], bool] | None
) -> np.ndarray | None:
    """Return for each row whether its ids survive decoding and encoding.

    Rows that hold other ids than the sampler emitted did not survive, whatever a test says.
    """
    changes = [row.batch.generation.replaced[row.generation_row] for row in rows]
    replaced = np.array(changes, np.bool_)
    if round_trip is None:
        return ~replaced if replaced.any() else None
    segments = [_policy_segments(row.batch.generation, row.generation_row) for row in rows]
    survives = np.array([all(round_trip(ids) for ids in parts) for parts in segments], np.bool_)
    return np.asarray(survives & ~replaced)


def _policy_segments(generation: GenerationBatch, number: int) -> list[list[int]]:
    """Return the runs of consecutive tokens that the policy emitted in a row."""
    if generation.emitted_by is None:
        return [generation.completion_ids[number].tolist()]
    is_policy = generation.emitted_by[number] == EmittedBy.POLICY
    parts = np.split(generation.completion_ids[number], np.flatnonzero(np.diff(is_policy)) + 1)
    return [part.tolist() for part in parts[0 if is_policy[:1].all() else 1 :: 2]]


def _emitted_by(rows: Sequence[TrainedRow]) -> np.ndarray | None:
    emitters = [row.emitted_by() for row in rows]
    known = [values for values in emitters if values is not None]
    return concatenate_arrays(known, np.int8) if len(known) == len(rows) else None


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
        [row.sampled_values(row.batch.generation.logp_sampler, np.nan) for row in rows]  # type: ignore[arg-type]
    )


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
    metrics = logged_metrics(record, kl_coef=kl_coef)
    metrics |= clip_metrics(
        record,
        clip_low=args.epsilon,
        clip_high=run_facts.clip_high(args),
        by_sequence=args.importance_sampling_level == "sequence",
    )
    return metrics


def parse_counts(
    batches: Sequence[MicroBatch], parse: Callable[[str], Any] | None
) -> tuple[int, int]:
    """Return the number of completions with a parsable answer, and of all; 0, 0 without `parse`."""
    if parse is None:
        return 0, 0
    rows = [
        (batch.generation, number)
        for batch in batches
        for number in generation_rows(batch.inputs, batch.generation)
    ]
    parsed = [parse(generation.texts[number]) is not None for generation, number in rows]
    return sum(parsed), len(parsed)
