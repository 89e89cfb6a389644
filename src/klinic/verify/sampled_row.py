"""Checks a function of logits and sampled tokens at one row whose tokens are mostly rare.

Such a function may treat some tokens exactly and sample the others, or subtract a baseline, so its
pull on one token means nothing alone. The expected gradient over all tokens of the row is exact:
sum over a of p(a) times the gradient with token a sampled. It must be p (k1 - KL), token by token.
"""

import torch
from torch import Tensor

from klinic.errors import FunctionError
from klinic.verify.loading import UserFunction
from klinic.verify.row_pulls import derivative

NUM_TOKENS = 512
NUM_ORDINARY = 16
RAREST_LOGP = -60.0
PULL_TOLERANCE = 0.01


def holds_for_rare_tokens(function: UserFunction, scale: float, dtype: torch.dtype) -> bool:
    """Whether the expected gradient is that of the KL to 1%, for each token by itself."""
    logits, logits_ref = (_wide_row(seed).to(dtype) for seed in (21, 22))
    leaf = logits.repeat(NUM_TOKENS, 2, 1).requires_grad_()
    tokens = torch.stack(
        [torch.arange(NUM_TOKENS), torch.zeros(NUM_TOKENS, dtype=torch.int64)], dim=1
    )
    logp, logp_ref = (row.double().log_softmax(-1) for row in (logits, logits_ref))
    arrays = {
        "logits": leaf,
        "logits_ref": logits_ref.repeat(NUM_TOKENS, 2, 1),
        "logp_old": logp[tokens].to(dtype),
        "tokens": tokens,
    }
    try:
        values = function(arrays)
    except FunctionError:
        return False
    gradient = derivative(values, leaf)[:, 0].double()  # with respect to the first token's row
    p, k1 = logp.exp(), logp - logp_ref
    pull = (p[:, None] * gradient).sum(0) / p
    expected = scale * (k1 - (p * k1).sum())
    error = (pull - expected).abs()
    return bool((error <= PULL_TOLERANCE * (abs(scale) + expected.abs())).all())


def _wide_row(seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    ordinary = torch.randn(NUM_ORDINARY, generator=rng, dtype=torch.float64)
    rare = torch.rand(NUM_TOKENS - NUM_ORDINARY, generator=rng, dtype=torch.float64)
    return torch.cat([ordinary.log_softmax(-1), RAREST_LOGP * (0.1 + 0.9 * rare)])
