"""Weights that DeepSpeed's ZeRO-3 splits over the processes of a run.

Outside a forward pass such a parameter is empty: `ds_shape` is its shape, and `ds_tensor` holds the
entries of this process, an equal part of all entries in order, padded at the end.
"""

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_zero_shard(tensor: Any) -> bool:
    """Whether ZeRO-3 holds a tensor in parts."""
    return hasattr(tensor, "ds_tensor")


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the full tensor."""
    return tuple(tensor.ds_shape if is_zero_shard(tensor) else tensor.shape)


def full_numel(tensor: Any) -> int:
    """Return the number of entries of the full tensor."""
    return math.prod(full_shape(tensor))


def gather_zero_shard(parameter: Any) -> Tensor:
    """Return the full tensor; every process must call this."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        gathered: Tensor = parameter.data.clone()
    return gathered


def own_entries(parameter: Any) -> tuple[Tensor, int]:
    """Return the entries that this process holds, without padding, and the place of the first."""
    part = parameter.ds_tensor.detach().reshape(-1)
    start = dist.get_rank(parameter.ds_process_group) * part.numel()
    return part[: max(0, full_numel(parameter) - start)], start


def sum_over_processes(values: Tensor, parameter: Any) -> Tensor:
    """Return the sum of the values of all processes that hold parts of a parameter."""
    total = values.to(parameter.device)  # parts may be on the CPU, where NCCL cannot add
    dist.all_reduce(total, group=parameter.ds_process_group)
    return total
