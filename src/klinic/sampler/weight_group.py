"""The group over which weights go from a trainer to those who sample with them.

Whole weights are gathered in the host's memory, wherever they are trained and used, so it is gloo.
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
PATIENCE = timedelta(minutes=10)  # somebody may be busy with a long completion
TCP = "tcp://"
MEMORY = Path("/dev/shm")  # noqa: S108 - what is handed over once needs no disk


def open_group(
    store: str, *, rank: int, size: int, host: str = LOOPBACK, meeting: timedelta = PATIENCE
) -> Any:
    """Return the group of the trainer, which is rank 0, and all who receive.

    `store` is where they meet: a file that all can write, or `tcp://` and the trainer's address.
    `host` is where the others reach this process, and `meeting` how long it waits for them.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = meeting
    group = ProcessGroupGloo(_store(store, rank, size, meeting), rank, size, options)
    group._set_default_timeout(PATIENCE)
    return group


@torch.no_grad()
def send(group: Any, tensors: Mapping[str, Tensor]) -> None:
    """Broadcast whole tensors from the trainer, one after the other."""
    for tensor in tensors.values():
        group.broadcast(tensor.detach().cpu().contiguous(), 0).wait()


def in_memory() -> str | None:
    """Return where files are kept in memory; None, which is anywhere, on systems without such."""
    return str(MEMORY) if MEMORY.is_dir() else None


def _store(where: str, rank: int, size: int, meeting: timedelta) -> Any:
    if not where.startswith(TCP):
        return FileStore(where, size)
    host, _, port = where.removeprefix(TCP).rpartition(":")
    return TCPStore(host, int(port), size, is_master=rank == 0, timeout=meeting)
