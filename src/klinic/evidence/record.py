"""The evidence of one step: flat tokens, rows that own them, and facts about the whole step."""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from klinic.errors import EvidenceError

SCHEMA = 1
"""The version of everything in this package that reaches a disk."""

Fact = float | int | str | None


TOKEN_FIELDS = (
    "token_ids",
    "loss_mask",
    "emitted_by",
    "logp_sampler",
    "logp",
    "logp_old",
    "logp_ref",
    "entropy",
    "kl_exact",
    "rank",
    "weight_version",
    "routing_mismatch",
)
"""Fields with one entry a token."""

ROW_FIELDS = (
    "group",
    "prompt_index",
    "sample",
    "finish_reason",
    "reward",
    "advantage",
    "cached_tokens",
    "prompt_ids_match",
    "round_trip",
)
"""Fields with one entry a completion; `reward_parts` has them by name."""


class EmittedBy(IntEnum):
    """Who put a token into a completion."""

    POLICY = 0
    TOOL = 1
    TEMPLATE = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """The evidence of one step; `None` means "was not recorded".

    Rows are completions and lie end to end: row b owns tokens row_offsets[b] to row_offsets[b + 1].
    Position t holds the log-prob *of* token t, not of the next one.
    """

    step: int
    """Which update, counted from 1."""

    group: Int[np.ndarray, "B"]
    """The place of the prompt within the step; rows with the same number are compared."""
    row_offsets: Int[np.ndarray, "B+1"]
    """Where each row starts, and the end."""
    prompt_index: Int[np.ndarray, "B"] | None = None
    """The place of the prompt in the dataset."""
    sample: Int[np.ndarray, "B"] | None = None
    """Which of the prompt's completions, counted from 0."""
    prompt_offsets: Int[np.ndarray, "B+1"] | None = None
    """Where each row's prompt starts in `prompt_ids`, and the end."""
    prompt_ids: Int[np.ndarray, "M"] | None = None
    """Every row's prompt as it was scored, end to end."""
    finish_reason: Shaped[np.ndarray, "B"] | None = None
    """How it ended: "stop", "length", or "" where that is unknown."""
    reward: Float[np.ndarray, "B"] | None = None
    """What the advantage was made of; NaN where no function gave one."""
    reward_parts: Mapping[str, Float[np.ndarray, "B"]] = field(default_factory=dict)
    """Per reward function, before weights; NaN where it gave none."""
    advantage: Float[np.ndarray, "B"] | None = None
    """As the loss used it."""
    cached_tokens: Int[np.ndarray, "B"] | None = None
    """Prompt tokens the sampler took from its prefix cache."""
    prompt_ids_match: Bool[np.ndarray, "B"] | None = None
    """True where the sampler was sent the very prompt ids that were scored."""
    round_trip: Bool[np.ndarray, "B"] | None = None
    """True where encode(decode(ids)) gives the ids again."""

    token_ids: Int[np.ndarray, "N"]
    """The completions as they were trained on."""
    loss_mask: Bool[np.ndarray, "N"]
    """True where the token is trained on."""
    emitted_by: Int[np.ndarray, "N"] | None = None
    """Who put the token there, as `EmittedBy` codes: 0 policy, 1 tool, 2 template."""
    logp_sampler: Float[np.ndarray, "N"] | None = None
    """As the sampler reported it while generating; NaN where it reported none."""
    logp: Float[np.ndarray, "N"] | None = None
    """Learner, the forward that carried the gradient."""
    logp_old: Float[np.ndarray, "N"] | None = None
    """Learner, weights at the start of the step."""
    logp_ref: Float[np.ndarray, "N"] | None = None
    """The reference, as it stood in this step."""
    entropy: Float[np.ndarray, "N"] | None = None
    """Of the policy's whole distribution at this place, in nats."""
    kl_exact: Float[np.ndarray, "N"] | None = None
    """KL of policy against reference over the vocabulary, in nats; NaN where not computed."""
    rank: Int[np.ndarray, "N"] | None = None
    """Of the token under the policy; 0 is the likeliest."""
    weight_version: Int[np.ndarray, "N"] | None = None
    """How many updates the weights had seen that sampled the token."""
    routing_mismatch: Float[np.ndarray, "N"] | None = None
    """Share of the mixture-of-experts layers whose experts differ between sampler and learner."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    """About the whole step; `fields.FACTS` lists the names klinic knows."""

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
                f"step {self.step}: `loss_mask` is {self.loss_mask.dtype}, and numbers would pick "
                "tokens by place. Record it as booleans."
            )
        self._check_prompts()
        rows = {name: getattr(self, name) for name in ROW_FIELDS}
        parts = {f"reward/{name}": array for name, array in self.reward_parts.items()}
        for name, array in (rows | parts).items():
            self._check_row_array(name, array)
        self._check_facts()

    @property
    def num_rows(self) -> int:
        """How many completions there are."""
        return len(self.row_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """How many tokens all completions have together."""
        return int(self.row_offsets[-1])

    def _check_offsets(self, name: str) -> None:
        offsets = getattr(self, name)
        legal = offsets.ndim == 1 and len(offsets) > 0 and offsets[0] == 0
        if not legal or bool((offsets[1:] < offsets[:-1]).any()):
            raise EvidenceError(
                f"step {self.step}: `{name}` must start at 0 and never fall, since row b owns "
                f"{name}[b] to {name}[b + 1]. Record the running sum of the rows' lengths."
            )

    def _check_tokens(self, name: str) -> None:
        array = getattr(self, name)
        if array is not None and array.shape != (self.num_tokens,):
            raise EvidenceError(
                f"step {self.step}: `{name}` has {_size(array)} tokens, but `row_offsets` ends at "
                f"{self.num_tokens}. Record every token array over the same rows, end to end."
            )

    def _check_row_array(self, name: str, array: Any) -> None:
        if array is not None and array.shape != (self.num_rows,):
            raise EvidenceError(
                f"step {self.step}: `{name}` has {_size(array)} entries, but `row_offsets` "
                f"describes {self.num_rows} rows. Record one entry a completion."
            )

    def _check_prompts(self) -> None:
        offsets, ids = self.prompt_offsets, self.prompt_ids
        if offsets is None and ids is None:
            return
        if offsets is None or ids is None:
            raise EvidenceError(
                f"step {self.step}: `prompt_offsets` and `prompt_ids` say nothing without one "
                "another. Record both or neither."
            )
        self._check_offsets("prompt_offsets")
        self._check_row_array("prompt_offsets", offsets[1:])
        if ids.shape != (int(offsets[-1]),):
            raise EvidenceError(
                f"step {self.step}: `prompt_ids` has {_size(ids)} tokens, but `prompt_offsets` "
                f"ends at {offsets[-1]}. Record every row's prompt, end to end."
            )

    def _check_facts(self) -> None:
        for name, value in self.facts.items():
            if not isinstance(value, numbers.Real | str | None):
                raise EvidenceError(
                    f"step {self.step}: the fact `{name}` is a {type(value).__name__}, which has "
                    "no place in JSON. Record a number, a string or None."
                )


def _size(array: Any) -> str:
    return "x".join(map(str, array.shape))
