"""Identify weights: a digest of all entries, and a fingerprint cheap enough for every step."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from klinic.model import zero_shards

NUM_SAMPLED = 64  # entries per tensor in a fingerprint
GOLDEN_SECTION = 0.618
PIECE = 2**22  # entries of another rank in memory while a digest is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Location and identity of a set of weights; it holds no tensors."""

    version: int
    """Number of updates applied to them."""
    fingerprint: str
    location: str
    """`process` for weights that sampler and learner share, else a path."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a possibly sharded one; every rank must call this."""
    if zero_shards.is_zero_shard(tensor):
        return zero_shards.gather_zero_shard(tensor)
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def trainable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable tensors, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict; they keep what ZeRO-3 knows about them."""
    return dict(model.state_dict(keep_vars=True))


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Return a hash of evenly spaced entries of every trainable tensor.

    An optimizer changes every entry, so a weight sync that changed nothing is detected by reading a
    few thousand numbers.
    """
    return sampled_digest(trainable_tensors(model))


@torch.no_grad()
def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of every entry of the tensors, usually a model's state dict.

    All ranks must call it on shards; each gets the entries of the others piece by piece.
    """
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        _start_tensor(total, name, tensor.dtype, zero_shards.full_shape(tensor))
        for piece in _pieces(tensor):
            _hash_entries(total, piece)
    return total.hexdigest()


def sample_entries(tensor: Tensor) -> Tensor:
    """Return evenly spaced entries of a tensor in all its columns, 64 or somewhat more."""
    return tensor.reshape(-1)[:: _spacing(tensor)]


@torch.no_grad()
def sampled_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of evenly spaced entries of every tensor; all ranks must call it on shards."""
    gathered = all_reduce_samples({name: p for name, p in tensors.items() if is_sharded(p)})
    entries = {
        name: gathered[name] if name in gathered else sample_entries(p.detach())
        for name, p in tensors.items()
    }
    total = hashlib.sha256()
    for named, together in _concat_by_device(entries):
        _start_tensor(total, named, together.dtype, tuple(together.shape))
        _hash_entries(total, together)
    return total.hexdigest()


def _concat_by_device(entries: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Concatenate entries by dtype and device, so that each device is read once."""
    same_device: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, sample in entries.items():
        same_device.setdefault((sample.dtype, sample.device), []).append(name)
    for names in same_device.values():
        named = " ".join(f"{name} {len(entries[name])}" for name in names)
        yield named, torch.cat([entries[name] for name in names])


def all_reduce_samples(sharded: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the sampled entries of sharded tensors, without gathering the full tensors."""
    if not sharded:
        return {}
    own = {name: _local_samples(tensor) for name, tensor in sharded.items()}
    # every entry is on one rank and 0 on the others, so the sum gathers them
    total = torch.cat([entries.view(torch.uint8) for entries in own.values()])
    first = next(iter(sharded.values()))
    if zero_shards.is_zero_shard(first):
        total = zero_shards.sum_over_processes(total, first)
    else:
        dist.all_reduce(total, group=shard_group(first))
    parts = torch.split(total, [entries.nbytes for entries in own.values()])
    return {
        name: part.clone().view(entries.dtype)
        for (name, entries), part in zip(own.items(), parts, strict=True)
    }


def shard_group(tensor: Any) -> Any:
    """Return the ranks that have different shards of a tensor; replicas have the same ones."""
    dimensions = [dim for dim, placed in enumerate(tensor.placements) if placed.is_shard()]
    return tensor.device_mesh.get_group(dimensions[0])


def _local_samples(tensor: Any) -> Tensor:
    """Return a tensor's sampled entries, with 0 for those on other ranks."""
    is_zero_shard = zero_shards.is_zero_shard(tensor)
    local, start = (zero_shards.own_entries if is_zero_shard else _own_rows)(tensor)
    spacing = _spacing(tensor)
    samples = local[-start % spacing :: spacing]
    entries: Tensor = local.new_zeros(math.ceil(zero_shards.full_numel(tensor) / spacing))
    first = math.ceil(start / spacing)
    entries[first : first + len(samples)] = samples
    return entries


def _own_rows(tensor: Any) -> tuple[Tensor, int]:
    """Return the entries of a DTensor on this rank, and the place of the first of them."""
    # takes a second to import, and only sharded learners need it
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if any(offset[1:]):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not sharded by rows")
    return tensor.to_local().reshape(-1), offset[0] * math.prod(tensor.shape[1:])


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process holds a part of a tensor."""
    return hasattr(tensor, "device_mesh") or zero_shards.is_zero_shard(tensor)


def _spacing(tensor: Tensor) -> int:
    """Return the distance of sampled entries, which goes through all columns of a matrix.

    A multiple of the row length would take all of one column, and a lost shard of the others stay
    unseen. By the golden section, entries of successive rows are far apart.
    """
    spacing = zero_shards.full_numel(tensor) // NUM_SAMPLED
    shape = zero_shards.full_shape(tensor)
    columns = shape[-1] if len(shape) > 1 else 0
    if columns and spacing >= columns:
        spacing -= (spacing - round(GOLDEN_SECTION * columns)) % columns
    return max(1, spacing)


def _start_tensor(total: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # a frozen base may be stored in bf16: its identity is that of the same entries in fp32
    dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    total.update(f"{name} {dtype} {shape}\n".encode())


def _hash_entries(total: Any, entries: Tensor) -> None:
    exact = entries.float() if entries.dtype == torch.bfloat16 else entries
    total.update(exact.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def _pieces(tensor: Any) -> Iterator[Tensor]:
    """Yield the entries of a tensor in order; of one that is sharded by rows a piece at a time."""
    if not _has_row_shards(tensor):
        yield full_tensor(tensor)
        return
    group, own = shard_group(tensor), tensor.to_local().detach().reshape(-1)
    row_size = math.prod(tensor.shape[1:])
    for rank, rows in enumerate(rows_of_ranks(tensor.shape[0], dist.get_world_size(group))):
        num = (rows.stop - rows.start) * row_size
        for start in range(0, num, PIECE):
            size = min(PIECE, num - start)
            is_own = rank == dist.get_rank(group)
            piece = own[start : start + size] if is_own else own.new_empty(size)
            dist.broadcast(piece, group=group, group_src=rank)
            yield piece


def _has_row_shards(tensor: Any) -> bool:
    """Whether a tensor is a DTensor that is split by rows, over one dimension of the ranks."""
    placements = getattr(tensor, "placements", ())
    return [p.is_shard(0) for p in placements if p.is_shard()] == [True]


def rows_of_ranks(num_rows: int, size: int) -> list[slice]:
    """Return the rows of each rank's shard, as torch divides them.

    >>> [(rows.start, rows.stop) for rows in rows_of_ranks(5, 4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = -(-num_rows // size)
    starts = [min(rank * most, num_rows) for rank in range(size + 1)]
    return [slice(*both) for both in pairwise(starts)]
