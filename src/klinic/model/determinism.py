"""Make torch on a CPU give the same bits for the same numbers.

torch sends `exp`, `log`, `sqrt` and the like to MKL, which picks the kernel of each function at its
first call. If that call runs on several threads, one of them can compute its whole share with a
kernel of low accuracy, once, without a word: 1e-9 off in float64, thousands of units in the last
place in float32 (https://github.com/pytorch/pytorch/issues/188792, oneMKL before 2025). A proof to
1e-9 fails by chance, and a resumed run is not the run that was killed. One call on one number
settles each kernel while nothing else runs.
"""

from functools import cache

import torch

# Unary functions of aten/src/ATen/cpu/vml.h; those that a build does not send to MKL cost nothing.
FUNCTIONS = (
    *("acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1"),
    *("floor", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sin"),
    *("sinh", "sqrt", "tan", "tanh", "trunc"),
)


@cache
def settle_kernels() -> None:
    """Call each of these functions once, on one number, before threads do."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(number)
