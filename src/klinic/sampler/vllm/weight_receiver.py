"""Receives weights inside a vLLM worker.

It follows vLLM's lifecycle (start, update, finish) and adds two things. On a CPU it repacks an
output head that is tied to the embedding; otherwise the packed copy silently keeps the old weights.
And it keeps a fingerprint of every tensor that arrived.
"""

import random
from dataclasses import asdict, dataclass
from datetime import timedelta
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

from klinic.model.tensor_prints import TensorPrint, print_tensor
from klinic.model.weight_stream import StreamPlan
from klinic.sampler.weight_group import LOOPBACK, TIMEOUT, GroupLostError, WeightGroup


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """How a worker joins the trainer's process group."""

    store: str
    size: int
    first_rank: int = 1
    """Rank of the engine's first worker."""
    host: str = LOOPBACK
    """Address of the worker for the others."""
    seconds: float = TIMEOUT.total_seconds()
    """How long the others may take to join."""
    pack_head: bool = True
    """Disabled only to reproduce the stale-head fault."""


@dataclass
class TensorManifest(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors about to be sent, as `StreamPlan` describes them."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    bucket_bytes: int


class WeightReceiver(WeightTransferEngine[TransferInit, TensorManifest]):  # type: ignore[misc]
    """Receives the tensors that the trainer broadcasts."""

    init_info_cls = TransferInit
    update_info_cls = TensorManifest

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the trainer's process group."""
        rank = init_info.first_rank + self.parallel_config.rank
        self._group = WeightGroup(
            init_info.store,
            rank=rank,
            size=init_info.size,
            host=init_info.host,
            timeout=timedelta(seconds=init_info.seconds),
        )
        self._packs_head = init_info.pack_head
        self.received: dict[str, TensorPrint] = {}

    def start_weight_update(self) -> None:
        """Prepare the model for weights in checkpoint format."""
        self.received = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TensorManifest) -> None:
        """Load the tensors into the model as they arrive."""
        try:
            for tensors in self._group.receive(StreamPlan.from_json(**asdict(update_info))):
                self.received |= {name: print_tensor(p) for name, p in tensors.items()}
                self.model.load_weights(list(tensors.items()))
                del tensors  # before the next ones are received
        except GroupLostError:
            # a layer may wait for the rest of its tensors: the next update must start afresh
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        """Finalize the loaded weights and repack the output head."""
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if self._packs_head and hasattr(head, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        """Leave the process group."""
        del self._group


class WorkerExtension:
    """RPC methods that klinic adds to vLLM's workers."""

    weight_transfer_engine: Any

    def klinic_seed(self, seed: str) -> None:
        """Seed every generator that vLLM samples with; a server passes arguments as text."""
        number = int(seed)
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002 - vLLM's own generator
        torch.manual_seed(number)

    def klinic_received(self) -> dict[str, tuple[float, str]]:
        """Return norm and sample of every tensor that arrived last."""
        received = getattr(self.weight_transfer_engine, "received", {})
        return {name: (one.norm, one.sample) for name, one in received.items()}
