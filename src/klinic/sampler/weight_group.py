"""The group over which weights go from a trainer to those who sample with them.

Whole weights are gathered in the host's memory, wherever they are trained and used, so it is gloo.
"""

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import ProcessGroupGloo

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(minutes=10)
TCP = "tcp://"


def open_group(store: str, *, rank: int, size: int, host: str = LOOPBACK) -> Any:
    """Return the group of the trainer, which is rank 0, and all who receive.

    `store` is where they meet: a file that all can write, or `tcp://` and the trainer's address.
    `host` is where the others reach this process.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = PATIENCE
    return ProcessGroupGloo(_store(store, rank, size), rank, size, options)


def _store(where: str, rank: int, size: int) -> Any:
    if not where.startswith(TCP):
        return FileStore(where, size)
    host, _, port = where.removeprefix(TCP).rpartition(":")
    return TCPStore(host, int(port), size, is_master=rank == 0, timeout=PATIENCE)
