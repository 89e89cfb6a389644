"""StepRecord: the evidence of one step as flat token arrays, per-row arrays and step facts."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from klinic.errors import EvidenceError

Fact = float | int | str | None
ProbeResult = dict[str, float | str | None]
"""The result of one active probe by field."""

TOKEN_FIELDS = (
    "token_ids",
    "loss_mask",
    "emitted_by",
    "logp_sampler",
    "logp",
    "logp_old",
    "logp_ref",
    "logp_teacher",
    "token_advantage",
    "entropy",
    "kl_exact",
    "rank",
    "weight_version",
    "routing_mismatch",
)
"""Fields with one entry per token."""

ROW_FIELDS = (
    "group",
    "prompt_index",
    "sample",
    "finish_reason",
    "reward",
    "advantage",
    "process",
    "loss_denominator",
    "cached_tokens",
    "prompt_ids_match",
    "round_trip",
)
"""Fields with one entry per completion; `reward_parts` maps names to such arrays."""


MIN_COPIED = 64  # entries of a row on average, from which copying rows is faster than indexing


class EmittedBy(IntEnum):
    """The source of a token in a completion."""

    POLICY = 0
    TOOL = 1
    TEMPLATE = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """The evidence of one step; `None` means "not recorded".

    Rows are completions, concatenated: row b holds tokens row_offsets[b] to row_offsets[b + 1].
    Position t holds the log-prob *of* token t, not of the next one.
    """

    step: int
    """The training step, counted from 1."""

    group: Int[np.ndarray, "B"]
    """Index of the prompt within the step; advantages compare rows of one group."""
    row_offsets: Int[np.ndarray, "B+1"]
    """Start of each row, and the end of the last."""
    prompt_index: Int[np.ndarray, "B"] | None = None
    """Index of the prompt in the dataset."""
    sample: Int[np.ndarray, "B"] | None = None
    """Index of the completion among those of its prompt, from 0."""
    prompt_offsets: Int[np.ndarray, "B+1"] | None = None
    """Start of each row's prompt in `prompt_ids`, and the end of the last."""
    prompt_ids: Int[np.ndarray, "M"] | None = None
    """The prompts of all rows as they were scored, concatenated."""
    finish_reason: Shaped[np.ndarray, "B"] | None = None
    """Either "stop" or "length"; "" if unknown."""
    reward: Float[np.ndarray, "B"] | None = None
    """The reward behind the advantage; NaN where no function returned one."""
    reward_parts: Mapping[str, Float[np.ndarray, "B"]] = field(default_factory=dict)
    """Per reward function, before weights; NaN where it returned none."""
    advantage: Float[np.ndarray, "B"] | None = None
    """As the loss used it; None if it differs between the tokens of a row."""
    process: Int[np.ndarray, "B"] | None = None
    """Rank of the learner process that trained the row."""
    loss_denominator: Float[np.ndarray, "B"] | None = None
    """Divisor of the row's summed loss, over all processes, if the rows may differ in it."""
    cached_tokens: Int[np.ndarray, "B"] | None = None
    """Prompt tokens that the sampler read from its prefix cache."""
    prompt_ids_match: Bool[np.ndarray, "B"] | None = None
    """True where the sampler received exactly the ids that were scored, in every turn."""
    round_trip: Bool[np.ndarray, "B"] | None = None
    """True where encode(decode(ids)) returns the same ids."""

    token_ids: Int[np.ndarray, "N"]
    """Token ids of the completions, as trained on."""
    loss_mask: Bool[np.ndarray, "N"]
    """True where the token is trained on."""
    emitted_by: Int[np.ndarray, "N"] | None = None
    """Source of the token, as `EmittedBy` codes: 0 policy, 1 tool, 2 template."""
    logp_sampler: Float[np.ndarray, "N"] | None = None
    """Sampler log-prob at generation time; NaN where the sampler reported none."""
    logp: Float[np.ndarray, "N"] | None = None
    """Learner log-prob of the forward pass that carried the gradient."""
    logp_old: Float[np.ndarray, "N"] | None = None
    """Learner log-prob under the weights at the start of the step."""
    logp_ref: Float[np.ndarray, "N"] | None = None
    """Log-prob under the reference of this step."""
    logp_teacher: Float[np.ndarray, "N"] | None = None
    """Log-prob under a teacher that the policy is distilled from."""
    token_advantage: Float[np.ndarray, "N"] | None = None
    """As the loss used it, where it differs between the tokens of a row."""
    entropy: Float[np.ndarray, "N"] | None = None
    """Of the policy's full distribution at this position, in nats."""
    kl_exact: Float[np.ndarray, "N"] | None = None
    """KL(policy || reference) over the vocabulary, in nats; NaN where not computed."""
    rank: Int[np.ndarray, "N"] | None = None
    """Rank of the token under the policy; 0 is the likeliest."""
    weight_version: Int[np.ndarray, "N"] | None = None
    """Number of updates of the weights that sampled the token."""
    routing_mismatch: Float[np.ndarray, "N"] | None = None
    """Fraction of mixture-of-experts layers whose experts differ between sampler and learner."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Facts about the step; `fields.FACTS` lists the names klinic knows."""

    def __post_init__(self) -> None:
        if self.step < 0:
            raise EvidenceError(
                f"step {self.step}: steps are counted from 1. Number the record by its update."
            )
        self._check_offsets("row_offsets")
        for name in TOKEN_FIELDS:
            self._check_tokens(name)
        if self.loss_mask.dtype != np.bool_:
            raise EvidenceError(
                f"step {self.step}: `loss_mask` is {self.loss_mask.dtype}, and integers would "
                "index tokens instead of masking them. Record it as booleans."
            )
        self._check_prompts()
        rows = {name: getattr(self, name) for name in ROW_FIELDS}
        parts = {f"reward/{name}": array for name, array in self.reward_parts.items()}
        for name, array in (rows | parts).items():
            self._check_row_array(name, array)
        self._check_facts()

    @property
    def num_rows(self) -> int:
        """Number of completions."""
        return len(self.row_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all completions."""
        return int(self.row_offsets[-1])

    def _check_offsets(self, name: str) -> None:
        offsets = getattr(self, name)
        legal = offsets.ndim == 1 and len(offsets) > 0 and offsets[0] == 0
        if not legal or bool((offsets[1:] < offsets[:-1]).any()):
            raise EvidenceError(
                f"step {self.step}: `{name}` must start at 0 and never decrease: row b spans "
                f"{name}[b] to {name}[b + 1]. Record the cumulative sum of the row lengths."
            )

    def _check_tokens(self, name: str) -> None:
        array = getattr(self, name)
        if array is not None and array.shape != (self.num_tokens,):
            raise EvidenceError(
                f"step {self.step}: `{name}` has {_shape_text(array)} "
                "tokens, but `row_offsets` ends at "
                f"{self.num_tokens}. Record every token array over the same rows, concatenated."
            )

    def _check_row_array(self, name: str, array: Any) -> None:
        if array is not None and array.shape != (self.num_rows,):
            raise EvidenceError(
                f"step {self.step}: `{name}` has {_shape_text(array)} entries, but `row_offsets` "
                f"describes {self.num_rows} rows. Record one entry per completion."
            )

    def _check_prompts(self) -> None:
        offsets, ids = self.prompt_offsets, self.prompt_ids
        if offsets is None and ids is None:
            return
        if offsets is None or ids is None:
            raise EvidenceError(
                f"step {self.step}: `prompt_offsets` and `prompt_ids` cannot be read without "
                "each other. Record both or neither."
            )
        self._check_offsets("prompt_offsets")
        self._check_row_array("prompt_offsets", offsets[1:])
        if ids.shape != (int(offsets[-1]),):
            raise EvidenceError(
                f"step {self.step}: `prompt_ids` has {_shape_text(ids)} "
                "tokens, but `prompt_offsets` "
                f"ends at {offsets[-1]}. Record the prompts of all rows, concatenated."
            )

    def _check_facts(self) -> None:
        for name, value in self.facts.items():
            if not isinstance(value, numbers.Real | str | None):
                raise EvidenceError(
                    f"step {self.step}: the fact `{name}` is a {type(value).__name__}, which "
                    "JSON cannot hold. Record a number, a string or None."
                )


def _shape_text(array: Any) -> str:
    return "x".join(map(str, array.shape))


def first_rows(record: StepRecord, num: int) -> StepRecord:
    """Return a record of the first `num` completions."""
    return record if num >= record.num_rows else select_rows(record, range(num))


def select_rows(record: StepRecord, rows: Sequence[int]) -> StepRecord:
    """Return a record of the completions at these row indices, in this order."""
    picked = np.asarray(rows, dtype=np.int64)
    tokens = _RowEntries(record.row_offsets, picked)
    columns: dict[str, Any] = {"row_offsets": tokens.offsets}
    for name in ROW_FIELDS:
        array = getattr(record, name)
        columns[name] = None if array is None else array[picked]
    columns |= {name: tokens.select(getattr(record, name)) for name in TOKEN_FIELDS}
    columns["reward_parts"] = {name: part[picked] for name, part in record.reward_parts.items()}
    if record.prompt_offsets is not None and record.prompt_ids is not None:
        prompts = _RowEntries(record.prompt_offsets, picked)
        columns["prompt_offsets"] = prompts.offsets
        columns["prompt_ids"] = prompts.select(record.prompt_ids)
    assert columns.keys() <= {field.name for field in fields(record)}  # noqa: S101 - all are columns
    return replace(record, **columns)


def entry_indices(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows' entries, and the offsets of the rows among them."""
    lengths, ends = np.diff(offsets)[rows], _offsets_of_rows(offsets, rows)
    return np.arange(ends[-1]) + np.repeat(offsets[:-1][rows] - ends[:-1], lengths), ends


def _offsets_of_rows(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    lengths = np.diff(offsets)[rows]
    return np.concatenate([[0], np.cumsum(lengths)]).astype(offsets.dtype)


class _RowEntries:
    """The entries of some rows: copied row by row, or by index where rows are short."""

    def __init__(self, offsets: np.ndarray, rows: np.ndarray) -> None:
        self.offsets = _offsets_of_rows(offsets, rows)
        self._slices: list[slice] | None = None
        if self.offsets[-1] >= MIN_COPIED * len(rows):
            bounds = zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
            self._slices = [slice(start, end) for start, end in bounds]
        else:
            self._indices, _ = entry_indices(offsets, rows)

    def select(self, values: np.ndarray | None) -> np.ndarray | None:
        """Return the entries among those of all rows."""
        if values is None or self._slices is None:
            return None if values is None else values[self._indices]
        parts = [values[entries] for entries in self._slices]
        return np.concatenate(parts) if parts else values[:0]
