"""Receives weights inside a vLLM worker.

It follows vLLM's lifecycle (start, update, finish) and adds two things. On a CPU it repacks an
output head that is tied to the embedding; otherwise the packed copy silently keeps the old weights.
And it reports the digest of the received weights.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from klinic.model.weights import sample_entries, sampled_digest
from klinic.sampler.weight_group import open_group

NO_DIGEST = ""


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """How a worker joins the trainer's process group."""

    store: str
    size: int
    pack_head: bool = True
    """Disabled only to reproduce the stale-head fault."""


@dataclass
class TensorManifest(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Names, dtypes and shapes of the tensors about to be sent."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class WeightReceiver(WeightTransferEngine[TransferInit, TensorManifest]):  # type: ignore[misc]
    """Receives the weights that the trainer broadcasts, tensor by tensor."""

    init_info_cls = TransferInit
    update_info_cls = TensorManifest

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the trainer's process group; the trainer is rank 0, workers follow."""
        rank = 1 + self.parallel_config.rank
        self._group: Any = open_group(init_info.store, rank=rank, size=init_info.size)
        self._packs_head = init_info.pack_head
        self.received = NO_DIGEST

    def start_weight_update(self) -> None:
        """Prepare the model for weights in checkpoint format."""
        self.received = NO_DIGEST
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TensorManifest) -> None:
        """Load the received tensors into the model one by one."""
        tensors = zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        samples: dict[str, torch.Tensor] = {}
        for name, dtype, shape in tensors:
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")  # gloo
            self._group.broadcast(weight, 0).wait()
            self.model.load_weights([(name, weight)])
            samples[name] = sample_entries(weight).clone()
        self.received = sampled_digest(samples)

    def finish_weight_update(self) -> None:
        """Finalize the loaded weights and repack the output head."""
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if self._packs_head and hasattr(head, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        """Leave the process group."""
        self._group = None


class WorkerExtension:
    """RPC methods that klinic adds to vLLM's workers."""

    weight_transfer_engine: Any

    def klinic_seed(self, seed: str) -> None:
        """Seed every generator that vLLM samples with; a server passes arguments as text."""
        number = int(seed)
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002 - vLLM's own generator
        torch.manual_seed(number)

    def klinic_received(self) -> dict[str, str]:
        """Return the digest of the last received weights."""
        return {"received": str(getattr(self.weight_transfer_engine, "received", NO_DIGEST))}
