"""Sends weights to vLLM workers: the tensor manifest and the broadcasts.

Trainer and workers form a gloo process group on the loopback interface; klinic's transfer engine
receives (`weight_receiver.py`).
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from klinic.sampler.weight_group import broadcast_tensors, open_group

BACKEND = "klinic"
WORKER_EXTENSION = "klinic.sampler.vllm.weight_receiver.WorkerExtension"


@runtime_checkable
class WeightTransferControl(Protocol):
    """The part of vLLM's weight-transfer lifecycle that the trainer drives."""

    num_workers: int

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make every worker join the process group."""

    def start_weight_update(self) -> None:
        """Prepare every worker for new weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make every worker receive weights; returns when all have."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make every worker use the received weights, labelled with their version."""


class WeightSender:
    """Broadcasts full tensors to the workers of an engine."""

    def __init__(self, control: WeightTransferControl, store: str, **options: Any) -> None:
        self._control = control
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-weights")
        size = 1 + control.num_workers
        init_info = {"store": store, "size": size, **options}
        joined = self._executor.submit(control.init_weight_transfer_engine, init_info)
        self._group = open_group(store, rank=0, size=size)
        joined.result()

    def send(self, tensors: Mapping[str, Tensor], version: str) -> None:
        """Replace the engine's weights with these tensors."""
        self._control.start_weight_update()
        update_info = {
            "names": list(tensors),
            "dtypes": [str(p.dtype).removeprefix("torch.") for p in tensors.values()],
            "shapes": [list(p.shape) for p in tensors.values()],
        }
        # the call blocks in the workers until the tensors arrive
        received = self._executor.submit(self._control.update_weights, update_info)
        broadcast_tensors(self._group, tensors)
        received.result()
        self._control.finish_weight_update(version)

    def close(self) -> None:
        """Leave the process group."""
        self._executor.shutdown(wait=False)
        self._group = None
