"""The process group that broadcasts weights from the trainer to samplers.

Weights pass through host memory whatever device trains or uses them, so the backend is gloo.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import ProcessGroupGloo

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)  # a worker may be busy with a long completion
TCP = "tcp://"
RAM_DISK = Path("/dev/shm")  # noqa: S108 - a RAM disk, for files that are read once


def open_group(
    store: str, *, rank: int, size: int, host: str = LOOPBACK, timeout: timedelta = TIMEOUT
) -> Any:
    """Return the process group of the trainer (rank 0) and all receivers.

    `store` is the rendezvous: a file that all can write, or `tcp://` and the trainer's address.
    `host` is the address at which the others reach this process, `timeout` limits the rendezvous.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    group = ProcessGroupGloo(_open_store(store, rank, size, timeout), rank, size, options)
    group._set_default_timeout(TIMEOUT)
    return group


@torch.no_grad()
def broadcast_tensors(group: Any, tensors: Mapping[str, Tensor]) -> None:
    """Broadcast full tensors from the trainer, one by one."""
    for tensor in tensors.values():
        group.broadcast(tensor.detach().cpu().contiguous(), 0).wait()


def ram_disk() -> str | None:
    """Return a RAM-backed folder for temporary files; None on systems without one."""
    return str(RAM_DISK) if RAM_DISK.is_dir() else None


def _open_store(address: str, rank: int, size: int, timeout: timedelta) -> Any:
    if not address.startswith(TCP):
        return FileStore(address, size)
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
