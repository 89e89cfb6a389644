"""Reads the dumps of slime and miles (`--dump-details DIR`).

`DIR/train_data/N.pt` of slime has `samples` with `tokens`, `response_lengths`, `loss_masks`,
`log_probs` of the learner before the update, `rollout_log_probs`, `ref_log_probs`, `advantages`,
`entropy` and `rollout_position`; `raw_reward` is that of the whole rollout, in its order. miles has
a file per rank, with the same columns in `rollout_data`, and the samples' `sample_indices`.
`DIR/rollout_data/N.pt` has the samples with `group_index` and `reward`. Log-probs and advantages
are those of the response alone.
Source: slime 624b824a8, slime/observability/train_data_utils.py:191, rollout_data_utils.py:140;
miles 31f1ca961, miles/utils/train_dump_utils.py:24, miles/ray/rollout/debug_data.py:103.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.rows import DumpRow, build_record, constant_advantage
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.readers.dumps.torch_files import TorchDump, TorchStep
from klinic.evidence.record import StepRecord
from klinic.integrations.torch_dumps.loading import (
    Fields,
    as_float,
    load_file,
    refuse_large_batch,
)

COLUMNS = {
    "logp_sampler": "rollout_log_probs",
    "logp_old": "log_probs",
    "logp_ref": "ref_log_probs",
    "logp_teacher": "teacher_log_probs",
    "token_advantage": "advantages",
    "entropy": "entropy",
}
PER_SAMPLE = ("tokens", "response_lengths", "loss_masks", "truncated", *COLUMNS.values())
REASONS = {0: "stop", 1: "length"}
STATUSES = {"completed": "stop", "truncated": "length"}


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the rollout knows of a sample."""

    group: int | None
    reward: float


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The samples of a rollout."""

    by_index: dict[int, Rollout]
    in_order: list[Rollout]

    def find(self, position: Any, index: Any) -> Rollout | None:
        """Return the sample at a position of the rollout, else the one with an index."""
        if type(position) is int and 0 <= position < len(self.in_order):
            return self.in_order[position]
        return self.by_index.get(index) if type(index) is int else None


def open_dump(dump: TorchDump) -> TokenDump:
    """Return the dump of a folder."""
    return TokenDump(
        format=f"details of {dump.trainer}",
        path=dump.folder,
        read_records=lambda: _read_records(dump.steps),
        facts={"trainer": dump.trainer},
        lacks="sources of tokens; settings of the sampler",
        num_files=len(dump.steps),
    )


def _read_records(steps: Sequence[TorchStep]) -> Iterator[StepRecord]:
    for files in steps:
        rows = _trained_rows(files) if files.trained else _sampled_rows(files)
        if rows:
            yield build_record(files.step, rows, {"learner_version": files.step - 1})


def _trained_rows(files: TorchStep) -> list[DumpRow]:
    rollouts = _read_rollouts(files)
    rows: dict[Any, DumpRow] = {}
    num_tokens = 0
    for path in files.trained:
        content = load_file(path)
        for number, sample in enumerate(_samples(content)):
            position, index = sample.get("rollout_position"), sample.get("sample_index")
            row = _parse_row(sample)
            num_tokens += len(row.token_ids) + len(row.prompt_ids)
            refuse_large_batch(num_tokens, str(path))
            _add_rollout(row, rollouts.find(position, index), content, position)
            key = next((k for k in (position, index) if type(k) is int), (str(path), number))
            # ranks of one tensor-parallel group hold the same rows
            rows.setdefault(key, row)
    return _whole_groups(list(rows.values()))


def _samples(content: Fields) -> list[Fields]:
    return content.dicts("samples") if "samples" in content.values else _rank_samples(content)


def _add_rollout(row: DumpRow, rollout: Rollout | None, content: Fields, position: Any) -> None:
    reward = _reward_at(content.get("raw_reward"), position)
    if rollout is not None:
        row.group = rollout.group
        reward = rollout.reward if np.isnan(reward) else reward
    row.values["reward"] = reward


def _whole_groups(rows: list[DumpRow]) -> list[DumpRow]:
    """Return the rows, grouped by their prompts if a row has no group."""
    if any(row.group is None for row in rows):
        for row in rows:
            row.group = None
    return rows


def _reward_at(rewards: Any, position: Any) -> float:
    """Return a reward of the whole rollout; NaN if it has none."""
    if (
        not isinstance(rewards, list)
        or type(position) is not int
        or not 0 <= position < len(rewards)
    ):
        return float("nan")
    reward = as_float(rewards[position])
    return float("nan") if reward is None else reward


def _rank_samples(content: Fields) -> list[Fields]:
    """Return the samples of a rank of miles, whose columns are lists."""
    columns = content.get("rollout_data")
    if not isinstance(columns, dict):
        raise content.error("samples", "a list of samples, and `rollout_data` no dict of columns")
    indices, tokens = columns.get("sample_indices"), columns.get("tokens")
    is_split = (as_float(content.get("cp_size")) or 1) > 1
    if not isinstance(tokens, list) or not isinstance(indices, list | type(None)):
        raise content.error("rollout_data", "a dict with lists of `tokens` and `sample_indices`")
    samples = []
    for number in range(len(tokens)):
        # a rank of context parallelism has a part of each column over the response
        names = PER_SAMPLE[:4] if is_split else PER_SAMPLE
        values = {name: _at(columns.get(name), number, content) for name in names}
        values["sample_index"] = None if indices is None else _at(indices, number, content)
        samples.append(Fields(values, f"{content.where}, sample {number}"))
    return samples


def _at(column: Any, number: int, content: Fields) -> Any:
    if column is None:
        return None
    if not isinstance(column, list) or len(column) <= number:
        raise content.error("rollout_data", "a dict of columns of equal length")
    return column[number]


def _parse_row(sample: Fields) -> DumpRow:
    ids, length = sample.ids("tokens"), sample.whole("response_lengths")
    row = _response_row(sample, ids, length, sample.floats("loss_masks"))
    for name, key in COLUMNS.items():
        column = sample.floats(key)
        if column is not None:
            row.tokens[name] = _of_response(sample, key, column, length)
    constant_advantage(row)
    row.finish_reason = REASONS.get(int(np.nan_to_num(sample.number("truncated"), nan=-1.0)), "")
    return row


def _response_row(sample: Fields, ids: np.ndarray, length: int, mask: np.ndarray | None) -> DumpRow:
    if length > len(ids):
        raise EvidenceError(
            f"{sample.where}: the response has {length} tokens, and the sample {len(ids)}. The "
            "file was damaged; restore it from a copy."
        )
    start = len(ids) - length
    mask = np.ones(length) if mask is None else _of_response(sample, "loss_masks", mask, length)
    return DumpRow(prompt_ids=ids[:start], token_ids=ids[start:], loss_mask=mask != 0)


def _of_response(sample: Fields, key: str, column: np.ndarray, length: int) -> np.ndarray:
    if len(column) != length:
        raise sample.error(key, f"a list of {length} numbers, one per token of the response")
    return column


def _read_rollouts(files: TorchStep) -> Rollouts:
    """Return group and reward of each sample."""
    rollouts = Rollouts({}, [])
    if files.rollouts is not None:
        for sample in load_file(files.rollouts).dicts("samples"):
            index, group = sample.get("index"), sample.get("group_index")
            rollout = Rollout(group if type(group) is int else None, _sample_reward(sample))
            rollouts.in_order.append(rollout)
            if type(index) is int:
                rollouts.by_index[index] = rollout
    return rollouts


def _sample_reward(sample: Fields) -> float:
    """Return the reward of a sample; NaN if it is a dict of several, of which one is trained on."""
    reward = as_float(sample.get("reward"))
    return float("nan") if reward is None else reward


def _sampled_rows(files: TorchStep) -> list[DumpRow]:
    """Return the rows of a rollout without training data, as of `--debug-rollout-only`."""
    if files.rollouts is None:
        return []
    rows = []
    for sample in load_file(files.rollouts).dicts("samples"):
        ids, length = sample.ids("tokens"), sample.whole("response_length")
        row = _response_row(sample, ids, length, sample.floats("loss_mask"))
        logp = sample.floats("rollout_log_probs")
        if logp is not None:
            row.tokens["logp_sampler"] = _of_response(sample, "rollout_log_probs", logp, length)
        group = sample.get("group_index")
        row.group = group if type(group) is int else None
        row.values["reward"] = _sample_reward(sample)
        row.finish_reason = STATUSES.get(str(sample.get("status")), "")
        rows.append(row)
    refuse_large_batch(sum(len(row.token_ids) for row in rows), str(files.rollouts))
    return _whole_groups(rows)
