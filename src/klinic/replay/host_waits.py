"""Counts, by line of code, where the host waits for an accelerator, and copies to it.

Every read of a number, copy to the host, and operation whose result has a size that the host must
know is one wait: the queue of kernels runs empty, and the device idles until the host has gone on.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import klinic

aten = torch.ops.aten
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten._unique2.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
OWN_FILES = f"{Path(klinic.__file__).parent}/"
TORCH_FILES = f"{Path(torch.__file__).parent}/"
UNKNOWN_LINE = "elsewhere"


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts waits of the host and copies to the device while active, by line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own: Counter[str] = Counter()
        """Waits in a line of klinic, or in one that cannot be found (a backward pass)."""
        self.of_libraries: Counter[str] = Counter()
        """Waits inside a library, such as transformers, by the line of klinic that calls it."""
        self.uploads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        takes_device = any(on_device(x) for x in inputs)
        result = func(*args, **kwargs)
        returns_device = any(
            on_device(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)
        )
        if takes_device and is_host_wait(func, args, returns_device=returns_device):
            line, in_library = calling_line()
            name = f"{line} {func.overloadpacket.__name__}"
            (self.of_libraries if in_library else self.own)[name] += 1
        is_copy = func is aten._to_copy.default or func is aten.copy_.default
        if is_copy and returns_device and not all(on_device(x) for x in inputs):
            self.uploads[calling_line()[0]] += 1
        return result


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


def is_host_wait(func: Any, args: Any, *, returns_device: bool) -> bool:
    """Whether the host waits for the result of an operation on tensors of the device."""
    if func is aten._local_scalar_dense.default or func in SIZED_BY_VALUES:
        return True
    if func is aten._to_copy.default:
        return not returns_device
    if func is aten.copy_.default:
        return not on_device(args[0])
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return any(i is not None and i.dtype == torch.bool for i in args[1])
    return False


def calling_line() -> tuple[str, bool]:
    """Return the innermost line of klinic, and whether a library called by it is running."""
    frame: FrameType | None = sys._getframe(1)
    in_library = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OWN_FILES) and file != __file__:
            return f"{file.removeprefix(OWN_FILES)}:{frame.f_lineno}", in_library
        in_library |= "/site-packages/" in file and not file.startswith(TORCH_FILES)
        frame = frame.f_back
    return UNKNOWN_LINE, False
