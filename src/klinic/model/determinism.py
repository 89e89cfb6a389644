"""Make torch bitwise reproducible.

torch dispatches `exp`, `log`, `sqrt` and similar functions to MKL, which selects the kernel of each
function at its first call. If that call is multi-threaded, one thread can silently compute its part
once with a low-accuracy kernel: errors of 1e-9 in float64, thousands of ulp in float32
(https://github.com/pytorch/pytorch/issues/188792, oneMKL before 2025). A proof to 1e-9 then fails
at random, and a resumed run differs from the run that was killed. One single-threaded call on one
number selects each kernel safely.
"""

import os
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

# Unary functions of aten/src/ATen/cpu/vml.h; calling one that a build does not use is harmless.
VML_FUNCTIONS = (
    *("acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1"),
    *("floor", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sin"),
    *("sinh", "sqrt", "tan", "tanh", "trunc"),
)


def use_deterministic_kernels() -> None:
    """Make torch use deterministic kernels, or refuse operations that have none."""
    # torch before 2.10 refuses every matrix product on a GPU without it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)


@cache
def initialize_vml_kernels() -> None:
    """Call every VML function once on one number, before any multi-threaded call."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in VML_FUNCTIONS:
            getattr(torch, name)(number)


def cumulative_sum(values: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """Return the cumulative sums of rows of non-negative numbers, which never decrease.

    CUDA has no deterministic cumulative sum of floats. Elsewhere than on the CPU they are computed
    by log2(V) additions of shifted rows, in an order that does not depend on the device.
    """
    if values.device.type == "cpu":
        return values.cumsum(-1)
    shift = 1
    while shift < values.shape[-1]:
        values = torch.cat([values[:, :shift], values[:, shift:] + values[:, :-shift]], -1)
        shift *= 2
    # neighbours are rounded in different orders
    return values.cummax(-1).values
