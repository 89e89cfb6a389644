"""Decide whether a model supports packed rows: flash attention that does not attend across rows.

Packing pays off only with flash attention, which handles rows of any length without padding; other
kernels materialise the mask between rows. Most transformers models detect row boundaries by
decreasing positions. Some do not, and then a row's log-probs silently depend on the row before it,
so support is tested on two rows.
"""

import numpy as np
import torch

from klinic.model.layout import lay_end_to_end
from klinic.model.scorer import TokenScorer

LENGTH = 8
ROUNDING = 0.02  # relative to a hidden state; bf16 rounding reaches 0.01


def packs(scorer: TokenScorer) -> bool:
    """Whether a model uses flash attention and keeps packed rows independent."""
    attention = str(scorer.lm.config._attn_implementation)
    return attention.startswith("flash_attention") and knows_rows_apart(scorer)


@torch.no_grad()
def knows_rows_apart(scorer: TokenScorer) -> bool:
    """Whether a row packed after another scores as if alone, independent of the other's tokens."""
    ids = np.arange(4 * LENGTH) % scorer.lm.get_output_embeddings().weight.shape[0]
    one, other, row = np.split(ids, [LENGTH, 2 * LENGTH])

    def last(*rows: np.ndarray) -> torch.Tensor:
        starts, rest = [row[:1] for row in rows], [row[1:] for row in rows]
        states = scorer.hidden(lay_end_to_end(starts, rest, device=scorer.device))
        return states[-len(row) + 1 :].double()

    alone, behind = last(row), last(one, row)
    moved = float((behind - alone).norm() / alone.norm())
    # masked entries are multiplied by exactly 0, hence `equal`
    return torch.equal(behind, last(other, row)) and moved < ROUNDING
