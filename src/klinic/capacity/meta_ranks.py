"""One rank of a sharded learner, without its weights and without the other ranks.

FSDP2 shards a policy of meta tensors over a process group that sends nothing (torch's `fake`
backend), so the memory of a rank is that of the code that a rank runs: shards, gathered layers and
the buffers of collectives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from klinic.capacity.memory import GATHERED, GRADIENTS, REFERENCE, WEIGHTS
from klinic.capacity.meta_policy import MetaPolicy
from klinic.capacity.meta_tensors import META, MemoryMeter, MetaTensor
from klinic.learner.fsdp import FsdpLearner, TorchProcessGroup
from klinic.learner.objective import Objective
from klinic.learner.settings import LearnerSettings

BUFFER_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


class _MetaBuffers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the buffers of collectives meta tensors: `torch.empty` has no values to lose."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self.shard_sizes: frozenset[int] = frozenset()
        """Numbers of entries of a rank's shards of the modules that are gathered together."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is not torch.ops.aten.empty.memory_format:
            return operation(*args, **kwargs)
        if kwargs.get("dtype", torch.get_default_dtype()) not in BUFFER_DTYPES:
            return operation(*args, **kwargs)
        empty = operation(*args, **{**kwargs, "device": META, "pin_memory": None})
        with self._meter.count_as(GRADIENTS if empty.numel() in self.shard_sizes else GATHERED):
            return MetaTensor(empty, self._meter)


@contextmanager
def sharded_learner(
    bare: MetaPolicy, *, num_ranks: int, objective: Objective, settings: LearnerSettings
) -> Iterator[FsdpLearner]:
    """Provide the first of `num_ranks` ranks of a learner within the context."""
    # the module registers torch's process group without communication
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    buffers = _MetaBuffers(bare.meter)
    try:
        with bare.meter.watch_resizing(), buffers:
            with bare.meter.count_as(WEIGHTS):
                learner = FsdpLearner(
                    bare.policy,
                    bare.reference,
                    objective=objective,
                    settings=settings,
                    group=TorchProcessGroup("cpu"),
                )
            if bare.reference is not None and bare.reference.kind == "copy":
                parameters: Any = bare.reference.scorer.parameters()
                bare.meter.relabel((p.to_local() for p in parameters), REFERENCE)
            buffers.shard_sizes = _shard_sizes(bare.policy.scorer)
            yield learner
    finally:
        dist.destroy_process_group()


def _shard_sizes(scorer: nn.Module) -> frozenset[int]:
    """Return the sizes of the buffers that gradients are reduced to."""
    sizes: set[int] = set()
    seen: set[int] = set()
    # inner modules first: the outermost has what is left
    for module in reversed(list(scorer.modules())):
        if isinstance(module, FSDPModule):
            own: list[Any] = [p for p in module.parameters() if id(p) not in seen]
            seen.update(map(id, own))
            sizes.add(sum(p.to_local().numel() for p in own if p.requires_grad))
    return frozenset(sizes)
