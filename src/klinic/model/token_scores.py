"""Per-token results of a forward pass."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """One value per completion token, with the rows concatenated."""

    logp: Float[Tensor, "n"]
    entropy: Float[Tensor, "n"]
    rank: Int[Tensor, "n"]
    """Number of vocabulary entries more likely than the token."""
    kl_exact: Float[Tensor, "n"] | None = None
    kl_topk: Float[Tensor, "n"] | None = None
    teacher_kl_exact: Float[Tensor, "n"] | None = None
    """As `kl_exact`, to the teacher."""
    teacher_kl_topk: Float[Tensor, "n"] | None = None


def concat_scores(parts: list[TokenScores]) -> TokenScores:
    """Concatenate the scores of consecutive tokens."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {}
    for field in fields(TokenScores):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    return TokenScores(**columns)
