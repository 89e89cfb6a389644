"""Lay out completions for a forward pass, and index the hidden state that predicts each token.

Rows are padded on the right, where a causal model cannot see the padding, so no attention mask is
needed and no token's position depends on the other rows. Packed rows are concatenated, each with
its own positions: transformers starts a new row, which attends to nothing before it, wherever the
position decreases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from klinic.errors import ShapeError
from klinic.evidence.rollout import concatenate_arrays, offsets_from_lengths
from klinic.model.token_filters import KeptTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Prompts and completions as the inputs of one forward pass."""

    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"]
    predict_at: Int[Tensor, "n"]
    """For each completion token, the flat index of the hidden state that predicts it."""
    target_ids: Int[Tensor, "n"]
    """The completion tokens of all rows, concatenated."""
    kept: KeptTokens | None = None
    """The tokens that a truncated sampler could have returned in their place; None for all."""

    @property
    def targets(self) -> "TokenTargets":
        """The completion tokens with their kept sets."""
        return TokenTargets(ids=self.target_ids, kept=self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTargets:
    """Tokens to score, and the sets of tokens that the distribution is restricted to."""

    ids: Int[Tensor, "n"]
    kept: KeptTokens | None = None

    def slice_tokens(self, tokens: slice) -> "TokenTargets":
        """Return the entries of a slice of tokens."""
        kept = None if self.kept is None else self.kept.slice_tokens(tokens)
        return TokenTargets(ids=self.ids[tokens], kept=kept)

    def restrict_logits(
        self, logits: Float[Tensor, "m V"], tokens: Int[Tensor, "m"] | None = None
    ) -> Float[Tensor, "m V"]:
        """Exclude the tokens that were not kept; `tokens` selects the rows of the logits."""
        if self.kept is None:
            return logits
        keep = self.kept.mask(logits.shape[-1])
        return logits.masked_fill(~(keep if tokens is None else keep[tokens]), -torch.inf)


def pad_rows(
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    *,
    pad_id: int,
    device: torch.device,
) -> Layout:
    """Return the rows, each a prompt followed by its completion, padded on the right."""
    _refuse_empty_prompts(prompts)
    starts = np.array([len(prompt) for prompt in prompts])
    lengths = np.array([len(completion) for completion in completions])
    longest = int((starts + lengths).max())
    input_ids = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    for row, prompt, completion in zip(input_ids, prompts, completions, strict=True):
        row[: len(prompt)] = prompt
        row[len(prompt) : len(prompt) + len(completion)] = completion
    # the token at position t is predicted by the hidden state at t - 1
    first = np.arange(len(prompts)) * longest + starts - 1
    predict_at = np.arange(lengths.sum()) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
    return Layout(
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.arange(longest, device=device).expand(len(prompts), longest),
        predict_at=torch.from_numpy(predict_at).to(device),
        target_ids=torch.from_numpy(concatenate_arrays(completions, np.int64)).to(device),
    )


def pack_rows(
    prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, device: torch.device
) -> Layout:
    """Return the rows concatenated into one, without padding."""
    _refuse_empty_prompts(prompts)
    rows = [np.concatenate(pair) for pair in zip(prompts, completions, strict=True)]
    spans = pairwise(offsets_from_lengths([len(row) for row in rows]))
    predict_at = [
        np.arange(begin + len(prompt) - 1, end - 1)
        for prompt, (begin, end) in zip(prompts, spans, strict=True)
    ]

    def concat_to_tensor(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(concatenate_arrays(parts, np.int64)).to(device)

    return Layout(
        input_ids=concat_to_tensor(rows)[None],
        position_ids=concat_to_tensor([np.arange(len(row)) for row in rows])[None],
        predict_at=concat_to_tensor(predict_at),
        target_ids=concat_to_tensor(completions),
    )


def _refuse_empty_prompts(prompts: Sequence[np.ndarray]) -> None:
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ShapeError(
                f"row {row} has an empty prompt, so nothing predicts its first token. Use a "
                "prompt of at least one token (a BOS token is enough)."
            )
