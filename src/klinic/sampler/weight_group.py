"""The group over which weights go from a trainer to those who sample with them."""

from datetime import timedelta
from typing import Any, Literal

from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import ProcessGroupGloo

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(minutes=10)
TCP = "tcp://"

Over = Literal["gloo", "nccl"]


def open_group(over: Over, store: str, *, rank: int, size: int, host: str = LOOPBACK) -> Any:
    """Return the group of the trainer, which is rank 0, and all who receive.

    `store` is where they meet: a file that all can write, or `tcp://` and the trainer's address.
    `host` is where the others reach this process.
    """
    if over == "nccl":  # not run: written after torch's documentation
        from torch.distributed import ProcessGroupNCCL

        waits = ProcessGroupNCCL.Options()
        waits._timeout = PATIENCE
        return ProcessGroupNCCL(_store(store, rank, size), rank, size, waits)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = PATIENCE
    return ProcessGroupGloo(_store(store, rank, size), rank, size, options)


def _store(where: str, rank: int, size: int) -> Any:
    if not where.startswith(TCP):
        return FileStore(where, size)
    host, _, port = where.removeprefix(TCP).rpartition(":")
    return TCPStore(host, int(port), size, is_master=rank == 0, timeout=PATIENCE)
