"""Counts, by line of klinic, where the host waits for the device, and how many kernels run.

The numbers are real (the stand-in computes), so nothing has to be guessed: every read of a number,
copy to the host, and operation whose size the host must know is one wait.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten._unique2.default,
    aten.masked_select.default,
    aten.bincount.default,
}
SOURCE = "/src/klinic/"


class HostReads(TorchDispatchMode):
    """Counts the waits of the host, copies to the device, and kernels, while active."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        before = any(on_device(x) for x in given)
        out = func(*args, **kwargs)
        after = any(on_device(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        where = f"{_klinic_line()} {func.overloadpacket.__name__}"
        if before and _waits(func, args, after=after):
            self.waits[where] += 1
        if after and not before and given:
            self.uploads[where] += 1
        if after and not func.is_view:
            self.kernels[where] += 1
        return out


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the accelerator."""
    return tensor.device.type != "cpu"


def _waits(func: Any, args: Any, *, after: bool) -> bool:
    if func is aten._local_scalar_dense.default or func in SIZED_BY_VALUES:
        return True
    if func is aten._to_copy.default:
        return not after
    if func is aten.copy_.default:
        return not on_device(args[0])
    if func in (aten.index.Tensor, aten.index_put_.default):
        return any(i is not None and i.dtype == torch.bool for i in args[1])
    return False


def _klinic_line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if SOURCE in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rpartition(SOURCE)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
