"""The receiving end of a weight update, inside a worker of vLLM.

It follows vLLM's own lifecycle (start, update, finish), and does two things that vLLM leaves out on
a CPU: a head that is tied to the embedding is packed anew, for the packed copy of it would keep the
old weights; and it can say what it received.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from klinic.model.weights import sampled_digest
from klinic.sampler.vllm_transfer import open_group


@dataclass
class Endpoint(WeightTransferInitInfo):
    """Where the group of trainer and workers meets."""

    store: str
    size: int


@dataclass
class Announced(WeightTransferUpdateInfo):
    """What is about to be sent."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]] = field(default_factory=list)


class GlooTransfer(WeightTransferEngine[Endpoint, Announced]):
    """Weights broadcast by the trainer over gloo, tensor by tensor."""

    init_info_cls = Endpoint
    update_info_cls = Announced

    def init_transfer_engine(self, init_info: Endpoint) -> None:
        """Join the trainer's group; workers come after it."""
        rank = 1 + self.parallel_config.rank
        self._group = open_group(init_info.store, rank=rank, size=init_info.size)

    def start_weight_update(self) -> None:
        """Make room for weights in the format of a checkpoint."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Announced) -> None:
        """Take the tensors one by one into the model."""
        received: dict[str, torch.Tensor] = {}
        for name, dtype, shape in zip(
            update_info.names, update_info.dtypes, update_info.shapes, strict=True
        ):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast([weight], root=0).wait()
            self.model.load_weights([(name, weight)])
            received[name] = weight.reshape(-1)[:: max(1, weight.numel() // 64)].clone()
        received_digest(self.model, sampled_digest(received))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights; there is no device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Put the weights to use, the packed head among them."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_head(self.model)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None
