"""Counts kernels besides the waits and copies that `klinic check --device` counts.

The numbers are real (the stand-in computes), so nothing has to be guessed.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from klinic.replay.host_waits import HostWaits, calling_line, on_device


class HostReads(HostWaits):
    """Counts the waits of the host, copies to the device, and kernels, while active."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(on_device(x) for x in results) and not func.is_view:
            self.kernels[calling_line()[0]] += 1
        return result
