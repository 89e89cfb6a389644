"""Reads traces of verifiers, as prime-rl stores them: rollouts/step_N/KIND/SUBSET/traces.jsonl.

A line is an episode with `traces`; a trace has `rewards` by name with weights, and `nodes`:
messages with `token_ids`, a `mask` of the sampled tokens, and per sampled token `logprobs` of the
sampler and, if they were computed, `trainer_logprobs`, `reference_logprobs`, `entropies` and
`advantages`.
Nodes form a tree by `parent`; each path to a leaf is one row. Numbers have four decimals.
Source: verifiers 0.4.0, verifiers/v1/graph.py:67-130; prime-rl 559b44772, monitors/file.py:50.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.json_fields import JsonEntry, read_entries
from klinic.evidence.readers.dumps.rows import (
    DumpRow,
    build_record,
    constant_advantage,
    split_sequence,
)
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.readers.log import parse_number
from klinic.evidence.record import EmittedBy, StepRecord

COLUMNS = {
    "logp_sampler": "logprobs",
    "logp_old": "trainer_logprobs",
    "logp_ref": "reference_logprobs",
    "entropy": "entropies",
    "token_advantage": "advantages",
}
MOST_NODES = 10_000  # of a trace
MOST_LEAVES = 64


def open_dump(folder: Path, files: Sequence[tuple[int, Path]]) -> TokenDump:
    """Return the dump of the traces of some steps."""
    return TokenDump(
        format="traces of verifiers",
        path=folder,
        read_records=lambda: _read_records(files),
        facts={"trainer": "prime-rl"},
        lacks="finish reasons; log-probs have four decimals",
        num_files=len(files),
    )


def _read_records(files: Sequence[tuple[int, Path]]) -> Iterator[StepRecord]:
    num_rows = 0
    for step, path in files:
        rows = read_rows(path)
        num_rows += len(rows)
        for row in rows:  # the mask is that of the sources, so it proves nothing about the loss
            del row.tokens["emitted_by"]
        if rows:
            yield build_record(step, rows, {"learner_version": step - 1} if step else {})
    if not num_rows:
        raise EvidenceError(
            f"{files[0][1]}: its traces have no token ids, as those of an evaluation through a "
            "chat endpoint, so no check can judge them. Give the traces of a training run."
        )


def read_rows(path: Path) -> list[DumpRow]:
    """Return the completions of the traces in a file."""
    return [row for entry in read_entries(path) for row in _episode_rows(entry)]


def _episode_rows(entry: JsonEntry) -> Iterator[DumpRow]:
    group = entry.values.get("group")
    key = group.get("id") if isinstance(group, dict) else None
    for trace in entry.items("traces"):
        if not isinstance(trace, dict):
            raise entry.error("traces", "a list of objects")
        parts = _reward_parts(trace.get("rewards"))
        for row in _trace_rows(JsonEntry(trace, entry.where)):
            row.group = key if isinstance(key, str) else None
            row.parts = {name: value for name, (value, _) in parts.items()}
            if parts:
                row.values["reward"] = sum(value * weight for value, weight in parts.values())
            yield row


def _reward_parts(rewards: Any) -> dict[str, tuple[float, float]]:
    """Return value and weight of each reward."""
    parts = {}
    for name, reward in rewards.items() if isinstance(rewards, dict) else ():
        if isinstance(reward, dict):
            value, weight = parse_number(reward.get("score")), parse_number(reward.get("weight", 1))
            if value is not None and weight is not None:
                parts[str(name)[:100]] = value, weight
    return parts


def _trace_rows(trace: JsonEntry) -> Iterator[DumpRow]:
    nodes = [JsonEntry(node, trace.where) for node in trace.items("nodes")[:MOST_NODES]]
    parents = [_parent(node, index) for index, node in enumerate(nodes)]
    leaves = [index for index in range(len(nodes)) if index not in parents]
    for leaf in leaves[:MOST_LEAVES]:
        path = [leaf]
        while (parent := parents[path[-1]]) is not None:
            path.append(parent)
        row = _path_row([nodes[index] for index in reversed(path)], trace.where)
        if row.loss_mask.any():
            yield row


def _parent(node: JsonEntry, index: int) -> int | None:
    """Return the node before a node; it comes earlier in the file, so that there are no loops."""
    if not isinstance(node.values, dict):
        raise EvidenceError(f"{node.where}: a node is not an object. Restore it from a copy.")
    if node.values.get("parent") is None:
        return None
    parent = node.step("parent")
    if parent >= index:
        raise node.error("parent", "an earlier node")
    return parent


def _path_row(nodes: Sequence[JsonEntry], where: str) -> DumpRow:
    ids = [node.ids("token_ids") for node in nodes]
    masks = [_mask(node, len(part)) for node, part in zip(nodes, ids, strict=True)]
    columns: dict[str, np.ndarray | None] = {}
    for name, key in COLUMNS.items():
        spread = [_spread(node, key, mask) for node, mask in zip(nodes, masks, strict=True)]
        is_present = any(node.values.get(key) for node in nodes)
        columns[name] = np.concatenate(spread) if is_present and spread else None
    mask = np.concatenate([np.zeros(0, np.bool_), *masks])
    row = split_sequence(np.concatenate([np.zeros(0, np.int64), *ids]), mask, columns, where)
    sources = [_sources(node, part) for node, part in zip(nodes, masks, strict=True)]
    row.tokens["emitted_by"] = np.concatenate([np.zeros(0, np.int64), *sources])[
        len(row.prompt_ids) :
    ]
    constant_advantage(row)
    return row


def _mask(node: JsonEntry, length: int) -> np.ndarray:
    mask = node.items("mask")
    if len(mask) != length or not all(isinstance(value, bool) for value in mask):
        raise node.error("mask", f"a list of {length} booleans")
    return np.array(mask, np.bool_)


def _spread(node: JsonEntry, key: str, mask: np.ndarray) -> np.ndarray:
    """Return the values of the sampled tokens at their places; NaN elsewhere."""
    column = np.full(len(mask), np.nan)
    values = node.floats(key)
    if values is None or not len(values):
        return column
    if len(values) != int(mask.sum()):
        raise node.error(key, f"a list of {int(mask.sum())} numbers, one per sampled token")
    column[mask] = values
    return column


def _sources(node: JsonEntry, mask: np.ndarray) -> np.ndarray:
    """Return the source of each token: policy, tool, or the chat template."""
    message = node.values.get("message")
    role = message.get("role") if isinstance(message, dict) else None
    other = EmittedBy.TOOL if role == "tool" else EmittedBy.TEMPLATE
    return np.where(mask, int(EmittedBy.POLICY), int(other)).astype(np.int64)
