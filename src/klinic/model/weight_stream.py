"""Streams weights as whole tensors in one dtype, in buckets of bounded size.

Ranks send the rows of their shards to rank 0, straight into a bucket: no process holds more than
its shards and one bucket. A bucket holds whole tensors, because engines load whole ones; a tensor
above the size has a bucket to itself. Sender and receivers divide the tensors alike.

With the weights go fingerprints of each tensor, which the sender computes on the shards and a
receiver on what arrived.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from klinic.errors import RankLostError, first_line
from klinic.model.tensor_prints import TensorPrint, hash_entries, sum_of_squares
from klinic.model.weights import (
    all_reduce_samples,
    is_sharded,
    rows_of_ranks,
    sample_entries,
    shard_group,
)

BUCKET_BYTES = 2**28


Shapes = dict[str, tuple[int, ...]]
"""Tensors in order, with their shapes."""


def group_tensors(shapes: Shapes, *, max_entries: int) -> Iterator[Shapes]:
    """Yield groups of consecutive tensors with at most so many entries, or a larger one alone."""
    group: Shapes = {}
    num_entries = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if group and num_entries + size > max_entries:
            yield group
            group, num_entries = {}, 0
        group[name] = shape
        num_entries += size
    if group:
        yield group


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """The tensors of a stream, and how they are divided into buckets."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    bucket_bytes: int = BUCKET_BYTES

    def buckets(self) -> Iterator[Shapes]:
        """Yield the tensors of each bucket with their shapes."""
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return group_tensors(shapes, max_entries=self.bucket_bytes // self.dtype.itemsize)

    @property
    def largest(self) -> int:
        """Number of entries of the largest bucket."""
        return max(map(num_entries, self.buckets()), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, for a receiver in another process."""
        return {
            "names": list(self.names),
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": str(self.dtype).removeprefix("torch."),
            "bucket_bytes": self.bucket_bytes,
        }

    @classmethod
    def from_json(
        cls, *, names: list[str], shapes: list[list[int]], dtype: str, bucket_bytes: int
    ) -> "StreamPlan":
        """Return the plan that a sender described."""
        return cls(
            names=tuple(names),
            shapes=tuple(tuple(shape) for shape in shapes),
            dtype=getattr(torch, dtype),
            bucket_bytes=bucket_bytes,
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of a stream, one after another in memory; valid until the next bucket."""

    data: Tensor
    tensors: dict[str, Tensor]
    """Views of `data`."""

    @property
    def shapes(self) -> Shapes:
        """The tensors in order, with their shapes."""
        return {name: tuple(p.shape) for name, p in self.tensors.items()}


def num_entries(shapes: Shapes) -> int:
    """Return the number of entries of all tensors together."""
    return sum(map(math.prod, shapes.values()))


def divide_bucket(memory: Tensor, shapes: Shapes) -> Bucket:
    """Return a bucket of tensors of these shapes at the start of `memory`."""
    starts = list(accumulate(map(math.prod, shapes.values()), initial=0))
    data = memory[: starts[-1]]
    views = {
        name: data[start:end].view(shape)
        for (name, shape), (start, end) in zip(shapes.items(), pairwise(starts), strict=True)
    }
    return Bucket(data, views)


class WeightStream:
    """The weights of this process or, if they are sharded, of all ranks, which iterate alike.

    It yields buckets on rank 0, and nothing on the others. As a context it ends with the last
    bucket, also if rank 0 stops before: the other ranks send all of them.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Take the tensors; none of them may change until the last bucket."""
        self.plan = StreamPlan(
            names=tuple(tensors),
            shapes=tuple(tuple(p.shape) for p in tensors.values()),
            dtype=dtype,
            bucket_bytes=bucket_bytes,
        )
        self._tensors = tensors
        self.fingerprints: dict[str, TensorPrint] = {}
        """Of every tensor as it was sent, after the last bucket."""
        self._squares: dict[str, Tensor] = {}
        self._memory: Tensor | None = None
        self._buckets = self._fill_buckets()

    def __iter__(self) -> Iterator[Bucket]:
        return self._buckets

    def __enter__(self) -> "WeightStream":
        return self

    def __exit__(self, *_: object) -> None:
        for _bucket in self:
            pass

    def collect(self) -> dict[str, Tensor]:
        """Return all tensors at once, in host memory; for those of an adapter, which are small."""
        return {
            name: p.to("cpu", copy=True) for bucket in self for name, p in bucket.tensors.items()
        }

    @torch.no_grad()
    def _fill_buckets(self) -> Iterator[Bucket]:
        for shapes in self.plan.buckets():
            tensors = {name: self._tensors[name].detach() for name in shapes}
            if not any(is_sharded(p) for p in tensors.values()):
                yield self._fill_here(tensors, shapes)
            elif (bucket := self._gather(tensors, shapes)) is not None:
                yield bucket
        self._memory = None
        self.fingerprints = self._take_fingerprints()

    def _fill_here(self, tensors: Mapping[str, Tensor], shapes: Shapes) -> Bucket:
        bucket = self._next_bucket(shapes, next(iter(tensors.values())).device)
        for name, tensor in tensors.items():
            bucket.tensors[name].copy_(tensor)
            self._squares[name] = sum_of_squares(bucket.tensors[name])
        return bucket

    def _next_bucket(self, shapes: Shapes, device: torch.device) -> Bucket:
        """Return a bucket without values, in the memory of the one before."""
        if self._memory is None:
            self._memory = torch.empty(self.plan.largest, dtype=self.plan.dtype, device=device)
        return divide_bucket(self._memory, shapes)

    def _gather(self, tensors: Mapping[str, Any], shapes: Shapes) -> Bucket | None:
        """Send this rank's rows to rank 0, which returns all rows; ranks of replicas do nothing."""
        first = next(iter(tensors.values()))
        group = shard_group(first)
        if dist.get_global_rank(group, 0) != 0:
            return None
        if dist.get_rank(group):
            own = [p.to_local().to(self.plan.dtype) for p in tensors.values()]
            self._squares |= {
                name: sum_of_squares(rows) for name, rows in zip(tensors, own, strict=True)
            }
            _transfer(dist.isend, [(rows, 0, tag) for tag, rows in enumerate(own)], group)
            return None
        bucket = self._next_bucket(shapes, first.to_local().device)
        arriving = []
        for tag, (name, whole) in enumerate(bucket.tensors.items()):
            own_rows, *peer_rows = rows_of_ranks(len(whole), dist.get_world_size(group))
            whole[own_rows].copy_(tensors[name].to_local())
            self._squares[name] = sum_of_squares(whole[own_rows])
            arriving += [(whole[rows], rank, tag) for rank, rows in enumerate(peer_rows, start=1)]
        _transfer(dist.irecv, arriving, group)
        return bucket

    def _take_fingerprints(self) -> dict[str, TensorPrint]:
        """Return the fingerprints of all tensors; of sharded ones all ranks take them together."""
        if not self._squares:  # a rank of another replica
            return {}
        sharded = {name: p for name, p in self._tensors.items() if is_sharded(p)}
        samples = all_reduce_samples(sharded)
        squares = torch.stack(list(self._squares.values()))
        if sharded:
            dist.all_reduce(squares, group=shard_group(next(iter(sharded.values()))))
        prints = {}
        for (name, p), total in zip(self._tensors.items(), squares.tolist(), strict=True):
            sample = samples[name] if name in samples else sample_entries(p.detach())
            prints[name] = TensorPrint(math.sqrt(total), hash_entries(sample.to(self.plan.dtype)))
        return prints


def _transfer(operation: Any, rows: Iterable[tuple[Tensor, int, int]], group: Any) -> None:
    """Send or receive rows all at once, each given with its peer and its tag."""
    operations = [
        dist.P2POp(operation, data, group=group, group_peer=peer, tag=tag)
        for data, peer, tag in rows
        if data.numel()
    ]
    try:
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    except RuntimeError as error:
        raise RankLostError(
            f"the weights of all ranks could not be gathered ({first_line(error)[:160]}). Only the "
            "steps since the newest checkpoint are lost: continue with --resume."
        ) from error
