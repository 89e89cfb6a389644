"""The processes of a run that torch.distributed started, for the Recorder and `klinic.attach`.

Data travels as bytes over a gloo group of its own, so that it neither waits for the collectives of
the training nor needs a GPU. Creating the group is a collective: every process must do it.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from klinic.errors import ConfigError


class TorchProcesses:
    """The processes of the default group of torch.distributed; one if it is not initialised."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size == 1:
            return
        if not dist.is_gloo_available():
            raise ConfigError(
                "this torch has no gloo backend, and klinic sends the rows of the processes over "
                "it. Install a torch with gloo, as the official builds have it."
            )
        self._group = dist.new_group(backend="gloo")

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every process by rank on rank 0; an empty list on the others."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._group)
        sizes = [int(length) for length in lengths]
        own = _to_tensor(data, max(sizes))
        if self.rank != 0:
            dist.gather(own, group=self._group, dst=0)
            return []
        rows = [torch.empty_like(own) for _ in sizes]
        dist.gather(own, rows, group=self._group, dst=0)
        return _to_bytes(rows, sizes)

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of rank 0 on every process."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0, group=self._group)
        size = int(length)
        values = _to_tensor(data, size) if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(values, src=0, group=self._group)
        return _to_bytes([values], [size])[0]


def _to_tensor(data: bytes, length: int) -> Tensor:
    """Return bytes as a tensor, padded to a length."""
    values = np.zeros(length, np.uint8)
    values[: len(data)] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(values)


def _to_bytes(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[bytes]:
    return [t[:size].numpy().tobytes() for t, size in zip(tensors, sizes, strict=True)]
