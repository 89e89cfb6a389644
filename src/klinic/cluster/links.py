"""How weights get from the first process to samplers: in memory they share, or over the network."""

import math
import threading
from collections.abc import Mapping
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from klinic.cluster.addresses import own_host
from klinic.errors import KlinicError
from klinic.sampler.weight_group import TCP, open_group, send

LOOK_EVERY = timedelta(seconds=0.5)
MEETING = timedelta(seconds=30)  # whoever is gone by then does not come, and others do without
LINE = 64  # bytes: what every type of number may begin at


class GroupLostError(KlinicError, RuntimeError):
    """Weights did not arrive, because somebody of the group is gone."""


@runtime_checkable
class Link(Protocol):
    """One end of the way that weights take. The first process sends, all the others receive."""

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send every tensor."""

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same names and shapes with what is sent."""

    def leave(self) -> None:
        """From another thread: let `receive` wait no longer, because somebody is gone."""


def open_link(store: str, tensors: Mapping[str, Tensor], *, rank: int, size: int) -> Link:
    """Return an end of a link; over the network, all `size` of them must open theirs."""
    if not store.startswith(TCP):
        return InMemory(store, tensors)
    try:
        return OverNetwork(store, rank=rank, size=size)
    except RuntimeError as error:
        raise GroupLostError(str(error)) from error


class InMemory:
    """A file in memory that the processes of one host share, with all tensors one after another.

    Whoever asks for `receive` does so when `send` is done, and sends again when all have received.
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor]) -> None:
        sizes = [math.ceil(p.numel() * p.element_size() / LINE) * LINE for p in tensors.values()]
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
        """Do nothing: nobody waits."""


class OverNetwork:
    """A broadcast to all who are in a group."""

    def __init__(self, store: str, *, rank: int, size: int) -> None:
        host = own_host(alone=False)
        self._group = open_group(store, rank=rank, size=size, host=host, meeting=MEETING)
        self._left = threading.Event()

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast every tensor; whoever is gone without a word is waited for."""
        send(self._group, tensors)

    @torch.no_grad()
    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Take part in the broadcast of every tensor."""
        for tensor in tensors.values():
            arrived = torch.empty_like(tensor, device="cpu")
            self._wait(self._group.broadcast(arrived, 0))
            tensor.copy_(arrived)

    def leave(self) -> None:
        """Wait no longer: a host that lost its power or its cable does not say goodbye."""
        self._left.set()

    def _wait(self, arriving: Any) -> None:
        while True:
            try:
                arriving.wait(LOOK_EVERY)
            except RuntimeError as error:
                if arriving.is_completed() or self._left.is_set():
                    raise GroupLostError(str(error)) from error
            else:
                return
