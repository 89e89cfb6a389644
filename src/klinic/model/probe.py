"""Tokens that any model can be asked about: do two models say the same?"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from klinic.model.layout import Layout, lay_out
from klinic.model.scorer import TokenScorer

ROWS = ((3, 29), (9, 8), (1, 5))
"""Lengths of prompt and completion: ordinary, padded and nearly empty rows."""
LIMIT = 1e-3
"""Most that a log-prob may differ in fp32. Merging an adapter was seen to shift one by 5.5e-5; a
layer that is left out, or a head that is tied to what was changed, shifts it by far more."""


def probe_layout(lm: Any, device: torch.device) -> Layout:
    """Return rows of token ids that are the same for every model with this vocabulary."""
    vocabulary = lm.get_output_embeddings().weight.shape[0]
    stream = np.random.Generator(np.random.Philox(0))
    rows = [stream.integers(0, vocabulary, sum(lengths)) for lengths in ROWS]
    prompts = [row[:cut] for row, (cut, _) in zip(rows, ROWS, strict=True)]
    completions = [row[cut:] for row, (cut, _) in zip(rows, ROWS, strict=True)]
    return lay_out(prompts, completions, pad_id=0, device=device)


@torch.no_grad()
def probe(scorer: TokenScorer) -> Float[Tensor, "n V"]:
    """Return the log-prob of every outcome at every completion token of the rows."""
    hidden = scorer.hidden(probe_layout(scorer.lm, scorer.device))
    return scorer.log_softmax(scorer.head(hidden)).cpu()


def largest_difference(a: Float[Tensor, "n V"], b: Float[Tensor, "n V"]) -> float:
    """Return the most that a log-prob differs; NaN where one of them is not a number.

    >>> largest_difference(torch.zeros(1, 2), torch.tensor([[0.5, -1.0]]))
    1.0
    """
    return float((a.double() - b.double()).abs().max())
