"""Whether a model knows rows apart that lie end to end.

Most of transformers' models do, by positions that fall. Some take no notice: then a row's log-probs
depend on the one before it, and nothing says so.
"""

import numpy as np
import torch

from klinic.errors import ConfigError
from klinic.model.layout import end_to_end
from klinic.model.scorer import TokenScorer

LENGTH = 8
LEAST = 0.05  # of what the row before would change; bf16 leaves a hundredth


@torch.no_grad()
def refuse_mixed_rows(scorer: TokenScorer, name: str) -> None:
    """Refuse a model in which a row that lies behind another sees it."""
    ids = np.arange(3 * LENGTH) % scorer.lm.get_output_embeddings().weight.shape[0]
    first, second = ids[:LENGTH], ids[LENGTH:]

    def last(*rows: np.ndarray) -> torch.Tensor:
        layout = end_to_end(
            [row[:1] for row in rows], [row[1:] for row in rows], device=scorer.device
        )
        return scorer.hidden(layout)[-len(second) + 1 :].double()

    alone, behind, mixed = last(second), last(first, second), last(ids)
    share = float((behind - alone).norm() / (mixed - alone).norm())
    if not share < LEAST:
        raise ConfigError(
            f"learner.packed is true, and model.name is {name}: of two rows that lie end to end, "
            f"the second changes by {share:.2g} of what it would if it saw the first (limit "
            f"{LEAST}). Its attention does not know rows apart. Leave learner.packed out: rows of "
            "similar length then go together, which needs little padding."
        )
