"""Top-k, top-p and min-p: which tokens a truncated sampler can return, and scoring under them.

The filters apply to the tempered distribution in vLLM's order: min-p, top-k, top-p. A policy
sampled through them is another distribution: the kept tokens, renormalized. The learner scores that
distribution. It finds the kept sets before the updates of a batch, from the policy that sampled it,
and holds them fixed: policy, old policy and reference are then restricted to the same tokens, and
ratio, KL and gradient are those of the distribution sampled from.

Source: the same sets for sampling and training, DeepSeek-V3.2 (2025), section 3.1, "Keep Sampling
Mask".
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klinic.evidence.rollout import offsets_from_lengths
from klinic.model.determinism import cumulative_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFilters:
    """Filters of a sampler; the defaults exclude no token."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def has_filters(self) -> bool:
        """Whether any filter can exclude a token."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


NO_FILTERS = TokenFilters()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The tokens that the filters kept at each completion token, concatenated."""

    token_ids: Int[Tensor, "K"]
    rows: Int[Tensor, "K"]
    """For each of them, the completion token whose place it could have taken."""
    offsets: Int[np.ndarray, "offsets"]
    """On the host, which slices by them."""

    @classmethod
    def from_masks(cls, masks: Iterable[Tensor]) -> "KeptTokens":
        """Return the kept tokens of masks over the vocabulary, of consecutive completion tokens.

        On an accelerator the host waits once for each mask, and once for all counts.
        """
        token_ids, rows, counts, start = [], [], [], 0
        for keep in masks:
            row, token = keep.nonzero().int().unbind(-1)
            rows.append(row + start)
            token_ids.append(token)
            counts.append(keep.sum(-1))
            start += len(keep)
        return cls(
            token_ids=torch.cat(token_ids),
            rows=torch.cat(rows),
            offsets=offsets_from_lengths(torch.cat(counts).tolist()),
        )

    def slice_tokens(self, tokens: slice) -> "KeptTokens":
        """Return the entries of a slice of completion tokens."""
        offsets = self.offsets[tokens.start : tokens.stop + 1]
        some = slice(int(offsets[0]), int(offsets[-1]))
        return KeptTokens(
            token_ids=self.token_ids[some],
            rows=self.rows[some] - tokens.start,
            offsets=offsets - offsets[0],
        )

    def mask(self, num_tokens: int) -> Bool[Tensor, "n V"]:
        """Return the mask over a vocabulary."""
        num_rows = len(self.offsets) - 1
        keep = torch.zeros(num_rows, num_tokens, dtype=torch.bool, device=self.rows.device)
        keep.view(-1)[self.rows.long() * num_tokens + self.token_ids] = True
        return keep


def restrict_logp(logp: Float[Tensor, "R V"], filters: TokenFilters) -> Float[Tensor, "R V"]:
    """Return the log-probs of the tokens that pass the filters, renormalized; -inf elsewhere."""
    return torch.log_softmax(logp.masked_fill(~filter_mask(logp, filters), -torch.inf), -1)


def filter_mask(logp: Float[Tensor, "R V"], filters: TokenFilters) -> Tensor:
    """Return the mask of tokens that pass the filters; the most likely token always does."""
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    p = ordered.double().exp()
    ranks = torch.arange(p.shape[-1], device=p.device)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if filters.min_p:
        keep &= p >= filters.min_p * p[:, :1]
    if filters.top_k:
        keep &= ranks < filters.top_k
    if filters.top_p < 1:
        p = torch.where(keep, p, 0.0)
        p = p / p.sum(-1, keepdim=True)
        keep &= cumulative_sum(p) - p < filters.top_p  # the token that crosses the limit is kept
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)
