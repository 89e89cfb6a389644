"""Whether rows may lie end to end: where attention skips what it may not see, and does.

Flash attention reads rows of any length without padding, and only there is it worth while: with
others the mask between rows is made and multiplied like any. Most of transformers' models know rows
apart by positions that fall. Some take no notice: then a row's log-probs depend on the one before
it, and nothing says so. So it is tried, on two rows.
"""

import numpy as np
import torch

from klinic.model.layout import lay_end_to_end
from klinic.model.scorer import TokenScorer

LENGTH = 8
ROUNDING = 0.02  # of a hidden state; bf16 leaves a hundredth


def packs(scorer: TokenScorer) -> bool:
    """Whether a model's attention skips other rows, and sees none of them."""
    attention = str(scorer.lm.config._attn_implementation)
    return attention.startswith("flash_attention") and knows_rows_apart(scorer)


@torch.no_grad()
def knows_rows_apart(scorer: TokenScorer) -> bool:
    """Whether a row behind another is as if alone, whatever the other says."""
    ids = np.arange(4 * LENGTH) % scorer.lm.get_output_embeddings().weight.shape[0]
    one, other, row = np.split(ids, [LENGTH, 2 * LENGTH])

    def last(*rows: np.ndarray) -> torch.Tensor:
        starts, rest = [row[:1] for row in rows], [row[1:] for row in rows]
        states = scorer.hidden(lay_end_to_end(starts, rest, device=scorer.device))
        return states[-len(row) + 1 :].double()

    alone, behind = last(row), last(one, row)
    moved = float((behind - alone).norm() / alone.norm())
    # what is masked is multiplied by exactly 0
    return torch.equal(behind, last(other, row)) and moved < ROUNDING
