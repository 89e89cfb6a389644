"""The attention kernel of a policy: which can be used on a device, and how to select one.

`auto` keeps the kernel that transformers selects. Flash attention and flex attention score packed
rows without padding (scorer.py); both need an accelerator: flash attention has no kernel for a CPU,
and torch's flex attention has no backward pass there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from klinic.errors import ConfigError

FLASH, FLEX, SDPA = "flash_attention_2", "flex_attention", "sdpa"
PACKED_KERNELS = (FLASH, FLEX)
"""Kernels that skip the tokens of other rows instead of masking them."""
FLASH_PACKAGE = "flash_attn"
DETERMINISTIC_FLASH = "FLASH_ATTENTION_DETERMINISTIC"  # transformers reads it in every pass


def refuse_missing_kernel(attention: str, device: torch.device, dtype: str) -> None:
    """Refuse an attention kernel that this machine cannot run, before a model is loaded."""
    problem = None
    if attention == FLASH:
        problem = _missing_for_flash(device, dtype)
    elif attention == FLEX and device.type not in ("cuda", "xpu"):
        problem = f"it has no backward pass on a device of type {device.type}"
    if problem is not None:
        raise ConfigError(
            f"model.attention is {attention}: {problem}. Change that, or set model.attention: auto."
        )


def _missing_for_flash(device: torch.device, dtype: str) -> str | None:
    if device.type != "cuda":
        return f"it needs an NVIDIA or AMD GPU, and model.device is {device}"
    if find_spec(FLASH_PACKAGE) is None:
        return "the package flash-attn is not installed here"
    return None if dtype == "bf16" else f"it computes in bf16, and model.dtype is {dtype}"


@contextmanager
def fp32_attention(lm: Any) -> Iterator[None]:
    """Compute attention in the dtype of its inputs: flash attention rounds fp32, or refuses it."""
    kernel = lm.config._attn_implementation
    if kernel != FLASH:
        yield
        return
    lm.set_attn_implementation(SDPA)
    try:
        yield
    finally:
        lm.set_attn_implementation(kernel)


def use_cpu_attention(lm: Any) -> None:
    """Replace a kernel that has no backward pass on the CPU."""
    if lm.config._attn_implementation in PACKED_KERNELS:
        lm.set_attn_implementation(SDPA)


def select_attention(lm: Any, attention: str, name: str) -> None:
    """Set the attention kernel of a loaded model; `auto` changes nothing."""
    if attention == "auto":
        return
    if attention == FLASH:
        os.environ.setdefault(DETERMINISTIC_FLASH, "1")
    try:
        lm.set_attn_implementation(attention)
        problem = f"it keeps {lm.config._attn_implementation}"
    except (ValueError, ImportError) as error:
        problem = str(error).partition("\n")[0]
    if lm.config._attn_implementation != attention:
        raise ConfigError(
            f"model.attention is {attention}, which {name} does not support ({problem}). Set "
            "model.attention: auto."
        )
