"""Checks a function on longer rows and on other batches than those that identified it.

long rows  1,100 tokens: a pull is k1 of its token, whatever the length, plus that of each later
           token for a gradient between completions
holes      masked tokens between others: the pulls are those of the row without them
batch      the pulls on a completion do not depend on the other completions
"""

import torch
from torch import Tensor

from klinic.errors import FunctionError
from klinic.verify.gradient_range import EARLIER_PULLS
from klinic.verify.identify import GradientIdentity
from klinic.verify.loading import UserFunction
from klinic.verify.row_pulls import evaluate_masked_pulls, evaluate_pulls

LONG_ROW_LENGTH = 1100
MOVED_POSITIONS = (0, 1, 2, 3, 7, 17, 63, 64, 127, 255, 256, 511, 512, 1023, 1024, 1098, 1099)
REFERENCE_SHIFT = 0.7
NUM_ROWS = 16
MASKS_WITH_HOLES = ((1, 0, 1), (0, 1, 1), (1, 0, 0, 1, 1), (1, 1, 0, 1, 0, 1), (0, 1, 0, 1, 1, 0))
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2}


def holds_on_long_rows(
    function: UserFunction, identity: GradientIdentity, compute_dtype: torch.dtype
) -> bool:
    """Whether moving the reference of one token moves the pulls as the identity demands."""
    logp, logp_ref = _random_rows(1, LONG_ROW_LENGTH)
    moved = torch.tensor(MOVED_POSITIONS)
    rows_ref = logp_ref.repeat(len(moved) + 1, 1)
    rows_ref[1 + torch.arange(len(moved)), moved] -= REFERENCE_SHIFT
    try:
        pulls = evaluate_pulls(function, logp.expand(len(rows_ref), -1), rows_ref).pull.double()
    except FunctionError:
        return False
    position = torch.arange(LONG_ROW_LENGTH)
    shift = torch.full((1,), -REFERENCE_SHIFT, dtype=torch.float64)
    expected = torch.where(
        position < moved[:, None], EARLIER_PULLS[str(identity.target)](shift), REFERENCE_SHIFT
    )
    # later tokens may depend on earlier ones: that averages to zero
    is_compared = position <= moved[:, None]
    error = (pulls[1:] - pulls[0]) / identity.scale - expected
    return bool((error * is_compared).abs().max() < TOLERANCE[compute_dtype])


def holds_with_holes(function: UserFunction, compute_dtype: torch.dtype) -> bool:
    """Whether masked tokens, wherever they are, change nothing and get no pull."""
    for pattern in MASKS_WITH_HOLES:
        logp, logp_ref = _random_rows(NUM_ROWS, len(pattern))
        is_kept = torch.tensor(pattern, dtype=torch.bool)
        mask = is_kept.expand(NUM_ROWS, -1)
        try:
            pulls = evaluate_masked_pulls(function, logp, logp_ref, mask)
            kept_pulls = evaluate_masked_pulls(
                function, logp[:, is_kept], logp_ref[:, is_kept], mask[:, is_kept]
            )
        except FunctionError:
            return False
        expected = torch.zeros_like(pulls)
        expected[:, is_kept] = kept_pulls
        tolerance = TOLERANCE[compute_dtype]
        if not torch.allclose(pulls, expected, rtol=tolerance, atol=tolerance):
            return False
    return True


def depends_on_batch(function: UserFunction, compute_dtype: torch.dtype) -> bool:
    """Whether the pulls on some completions change when others are left out."""
    logp, logp_ref = _random_rows(NUM_ROWS, 3)
    try:
        whole, part = (
            evaluate_pulls(function, logp[:count], logp_ref[:count]).pull.double()
            for count in (NUM_ROWS, 5)
        )
    except FunctionError:
        return False
    tolerance = TOLERANCE[compute_dtype]
    return not torch.allclose(whole[:5], part, rtol=tolerance, atol=tolerance, equal_nan=True)


def _random_rows(num_rows: int, length: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    logp, logp_ref = (
        -0.05 - 3 * torch.rand(num_rows, length, generator=rng, dtype=torch.float64)
        for _ in range(2)
    )
    return logp, logp_ref
