"""Weight transfer from the driver to samplers: shared memory, or broadcast over the network."""

import math
import threading
from collections.abc import Mapping
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from klinic.cluster.session import local_address
from klinic.errors import KlinicError
from klinic.sampler.weight_group import TCP, broadcast_tensors, open_group

WAIT_INTERVAL = timedelta(seconds=0.5)
# for all ranks to connect; the group is rebuilt without the others
CONNECT_TIMEOUT = timedelta(seconds=30)
ALIGNMENT = 64  # bytes; alignment that suits every dtype


class GroupLostError(KlinicError, RuntimeError):
    """The weight transfer failed because a member of the group died."""


@runtime_checkable
class WeightLink(Protocol):
    """One end of a weight transfer. The driver sends, all others receive."""

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send every tensor."""

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Receive into tensors of the same names and shapes."""

    def leave(self) -> None:
        """From another thread: abort a pending `receive`."""


def open_link(store: str, tensors: Mapping[str, Tensor], *, rank: int, size: int) -> WeightLink:
    """Open one end of a link; over the network this blocks until all `size` ends are open."""
    if not store.startswith(TCP):
        return SharedMemoryLink(store, tensors)
    try:
        return BroadcastLink(store, rank=rank, size=size)
    except RuntimeError as error:
        raise GroupLostError(str(error)) from error


class SharedMemoryLink:
    """A shared-memory file with all tensors concatenated, for processes on one host.

    The caller orders the calls: `receive` after `send` is done, the next `send` after all received.
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor]) -> None:
        sizes = [
            math.ceil(p.numel() * p.element_size() / ALIGNMENT) * ALIGNMENT
            for p in tensors.values()
        ]
        starts = list(accumulate(sizes, initial=0))
        file = torch.from_file(path, shared=True, size=max(1, starts[-1]), dtype=torch.uint8)
        self._parts = {
            name: file[start:end][: p.numel() * p.element_size()].view(p.dtype).view(p.shape)
            for (name, p), (start, end) in zip(tensors.items(), pairwise(starts), strict=True)
        }

    @torch.no_grad()
    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every tensor into the file."""
        for name, tensor in tensors.items():
            self._parts[name].copy_(tensor)

    @torch.no_grad()
    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every tensor out of the file."""
        for name, tensor in tensors.items():
            tensor.copy_(self._parts[name])

    def leave(self) -> None:
        """Do nothing: `receive` does not block."""


class BroadcastLink:
    """A broadcast over a process group."""

    def __init__(self, store: str, *, rank: int, size: int) -> None:
        host = local_address(is_local=False)
        self._group = open_group(store, rank=rank, size=size, host=host, timeout=CONNECT_TIMEOUT)
        self._left = threading.Event()

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast every tensor; blocks while a receiver hangs."""
        broadcast_tensors(self._group, tensors)

    @torch.no_grad()
    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Receive the broadcast of every tensor."""
        for tensor in tensors.values():
            arrived = torch.empty_like(tensor, device="cpu")
            self._wait_for_work(self._group.broadcast(arrived, 0))
            tensor.copy_(arrived)

    def leave(self) -> None:
        """Abort a pending receive: a host that lost power or network sends no FIN."""
        self._left.set()

    def _wait_for_work(self, pending: Any) -> None:
        while True:
            try:
                pending.wait(WAIT_INTERVAL)
            except RuntimeError as error:
                if pending.is_completed() or self._left.is_set():
                    raise GroupLostError(str(error)) from error
            else:
                return
