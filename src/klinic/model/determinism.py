"""Make torch on a CPU bitwise reproducible.

torch dispatches `exp`, `log`, `sqrt` and similar functions to MKL, which selects the kernel of each
function at its first call. If that call is multi-threaded, one thread can silently compute its part
once with a low-accuracy kernel: errors of 1e-9 in float64, thousands of ulp in float32
(https://github.com/pytorch/pytorch/issues/188792, oneMKL before 2025). A proof to 1e-9 then fails
at random, and a resumed run differs from the run that was killed. One single-threaded call on one
number selects each kernel safely.
"""

from functools import cache

import torch

# Unary functions of aten/src/ATen/cpu/vml.h; calling one that a build does not use is harmless.
VML_FUNCTIONS = (
    *("acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1"),
    *("floor", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sin"),
    *("sinh", "sqrt", "tan", "tanh", "trunc"),
)


@cache
def initialize_vml_kernels() -> None:
    """Call every VML function once on one number, before any multi-threaded call."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in VML_FUNCTIONS:
            getattr(torch, name)(number)
