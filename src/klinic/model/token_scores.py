"""What a forward pass says about each completion token."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """A value for each token, the tokens of all rows end to end."""

    logp: Float[Tensor, "n"]
    entropy: Float[Tensor, "n"]
    rank: Int[Tensor, "n"]
    """How many outcomes are likelier than the token."""
    kl_exact: Float[Tensor, "n"] | None = None
    kl_topk: Float[Tensor, "n"] | None = None
    logp_ref: Float[Tensor, "n"] | None = None


def joined_scores(parts: list[TokenScores]) -> TokenScores:
    """Return the scores of neighbouring tokens as one."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {}
    for field in fields(TokenScores):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    return TokenScores(**columns)
