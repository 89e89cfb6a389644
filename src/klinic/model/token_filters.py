"""Top-k, top-p and min-p: which tokens a truncated sampler can return, and scoring under them.

The filters apply to the tempered distribution in vLLM's order: min-p, top-k, top-p. A policy
sampled through them is another distribution: the kept tokens, renormalized. The learner scores that
distribution. It finds the kept sets before the updates of a batch, from the policy that sampled it,
and holds them fixed: policy, old policy and reference are then restricted to the same tokens, and
ratio, KL and gradient are those of the distribution sampled from.

Source: the same sets for sampling and training, DeepSeek-V3.2 (2025), section 3.1, "Keep Sampling
Mask".
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
    offsets: Int[Tensor, "offsets"]

    @classmethod
    def from_mask(cls, keep: Bool[Tensor, "n V"]) -> "KeptTokens":
        """Return the kept tokens of a mask."""
        counts = torch.nn.functional.pad(keep.sum(-1), (1, 0))
        return cls(token_ids=keep.nonzero()[:, 1].int(), offsets=counts.cumsum(0))

    def slice_tokens(self, tokens: slice) -> "KeptTokens":
        """Return the entries of a slice of completion tokens."""
        offsets = self.offsets[tokens.start : tokens.stop + 1]
        token_ids = self.token_ids[int(offsets[0]) : int(offsets[-1])]
        return KeptTokens(token_ids=token_ids, offsets=offsets - offsets[0])

    def mask(self, num_tokens: int) -> Bool[Tensor, "n V"]:
        """Return the mask over a vocabulary."""
        num_rows = len(self.offsets) - 1
        rows = torch.arange(num_rows, device=self.offsets.device)
        rows = rows.repeat_interleave(self.offsets.diff())
        keep = torch.zeros(num_rows, num_tokens, dtype=torch.bool, device=rows.device)
        keep[rows, self.token_ids.long()] = True
        return keep


def concat_kept(parts: list[KeptTokens]) -> KeptTokens:
    """Concatenate the kept tokens of consecutive completion tokens."""
    counts = torch.cat([part.offsets.diff() for part in parts])
    return KeptTokens(
        token_ids=torch.cat([part.token_ids for part in parts]),
        offsets=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
    )


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
