"""Compare two models by their log-probs on fixed tokens."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from klinic.model.layout import Layout, pad_rows
from klinic.model.scorer import TokenScorer

PROBE_ROWS = ((3, 29), (9, 8), (1, 5))
"""Lengths of prompt and completion: ordinary, padded and nearly empty rows."""
MAX_LOGP_DIFFERENCE = 1e-3
"""Largest allowed difference of a log-prob in fp32. Merging an adapter shifted one by 5.5e-5; a
missing layer, or a head tied to a changed embedding, shifts it by far more."""


def probe_layout(lm: Any, device: torch.device) -> Layout:
    """Return rows of token ids that are equal for all models with the same vocabulary size."""
    vocabulary = lm.get_output_embeddings().weight.shape[0]
    stream = np.random.Generator(np.random.Philox(0))
    rows = [stream.integers(0, vocabulary, sum(lengths)) for lengths in PROBE_ROWS]
    prompts = [row[:cut] for row, (cut, _) in zip(rows, PROBE_ROWS, strict=True)]
    completions = [row[cut:] for row, (cut, _) in zip(rows, PROBE_ROWS, strict=True)]
    return pad_rows(prompts, completions, pad_id=0, device=device)


@torch.no_grad()
def probe_logp(scorer: TokenScorer) -> Float[Tensor, "n V"]:
    """Return the log-probs of the full vocabulary at every completion token of these rows."""
    hidden = scorer.hidden(probe_layout(scorer.lm, scorer.device))
    return scorer.log_softmax(scorer.head(hidden)).cpu()


def largest_difference(a: Float[Tensor, "n V"], b: Float[Tensor, "n V"]) -> float:
    """Return the largest absolute difference of two sets of log-probs; NaN where one is NaN.

    >>> largest_difference(torch.zeros(1, 2), torch.tensor([[0.5, -1.0]]))
    1.0
    """
    return float((a.double() - b.double()).abs().max())
