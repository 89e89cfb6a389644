"""The gloo process group that broadcasts weights from the trainer to samplers.

Weights pass through host memory. The group is made anew when a member is lost.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import ProcessGroupGloo

from klinic.errors import KlinicError
from klinic.model.weight_stream import (
    Bucket,
    Shapes,
    StreamPlan,
    divide_bucket,
    group_tensors,
    num_entries,
)

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)  # a worker may be busy with a long completion
WAIT_INTERVAL = timedelta(seconds=0.5)  # between two checks that a transfer goes on
CONNECT_TIMEOUT = timedelta(seconds=30)  # for all ends; a group is made anew without the others
TCP = "tcp://"
RAM_DISK = Path("/dev/shm")  # noqa: S108 - a RAM disk, for files that are read once
PIECE_BYTES = 2**25  # of a bucket, sent at once: what a receiver holds beside its engine
ABANDONED = "klinic_abandoned"
LOST: list[Any] = []
"""Broadcasts that never ended, which are kept: destroying one would block on its dead peers."""


class GroupLostError(KlinicError, RuntimeError):
    """The weight transfer failed because a member of the group died."""


class WeightGroup:
    """One end of a weight transfer: the trainer is rank 0 and sends, all others receive."""

    def __init__(
        self,
        store: str,
        *,
        rank: int,
        size: int,
        host: str = LOOPBACK,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        """Join the others; this blocks until all `size` ends are there.

        `store` is the rendezvous: a file that all can write, or `tcp://` and the trainer's address.
        `host` is the address at which the others reach this process, `timeout` limits the
        rendezvous.
        """
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            self._store = _open_store(store, rank, size, timeout)
            self._group: Any = ProcessGroupGloo(self._store, rank, size, options)
        except RuntimeError as error:
            raise GroupLostError(str(error)) from error
        self._group._set_default_timeout(TIMEOUT)

    def send(self, bucket: Bucket, *, is_over: Callable[[], bool]) -> None:
        """Broadcast a bucket in pieces; give up if the transfer is over for the receivers."""
        start = 0
        for shapes in _pieces(bucket.shapes, bucket.data.dtype):
            end = start + num_entries(shapes)
            _wait(self._group.broadcast(bucket.data[start:end].cpu(), 0), is_over)
            start = end

    def receive(self, plan: StreamPlan) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each piece that the trainer broadcasts, until it abandons the group.

        An engine may keep the tensors of a layer until it is complete, so each piece has its own
        memory, which is free as soon as nobody holds one of them.
        """
        for bucket in plan.buckets():
            for shapes in _pieces(bucket, plan.dtype):
                yield self._receive_piece(shapes, plan.dtype)

    def _receive_piece(self, shapes: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
        data = torch.empty(num_entries(shapes), dtype=dtype)
        _wait(self._group.broadcast(data, 0), self._is_abandoned)
        return divide_bucket(data, shapes).tensors

    def abandon(self) -> None:
        """Make all others give up a pending receive: they may wait for a member that died."""
        self._store.set(ABANDONED, b"1")

    def _is_abandoned(self) -> bool:
        try:
            return bool(self._store.check([ABANDONED]))
        except RuntimeError:  # the trainer, who serves it, has exited
            return True


def _pieces(shapes: Shapes, dtype: torch.dtype) -> Iterator[Shapes]:
    return group_tensors(shapes, max_entries=PIECE_BYTES // dtype.itemsize)


def _wait(pending: Any, is_over: Callable[[], bool]) -> None:
    """Wait for a broadcast: a host that lost power or network sends no FIN."""
    while True:
        try:
            pending.wait(WAIT_INTERVAL)
        except RuntimeError as error:
            if pending.is_completed() or is_over():
                LOST.append(pending)
                raise GroupLostError(str(error)) from error
        else:
            return


def ram_disk() -> str | None:
    """Return a RAM-backed folder for temporary files; None on systems without one."""
    return str(RAM_DISK) if RAM_DISK.is_dir() else None


def _open_store(address: str, rank: int, size: int, timeout: timedelta) -> Any:
    if not address.startswith(TCP):
        return FileStore(address, size)
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
