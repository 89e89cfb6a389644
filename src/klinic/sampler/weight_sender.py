"""Sends streams of weights to receivers, which follow the lifecycle of vLLM's weight transfer.

The receivers are the workers of vLLM engines, or sampler processes with a policy of their own.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from klinic.model.tensor_prints import TensorPrint
from klinic.model.weight_stream import WeightStream
from klinic.sampler.weight_group import LOOPBACK, TIMEOUT, GroupLostError, WeightGroup


@runtime_checkable
class WeightTransferControl(Protocol):
    """The calls with which the trainer drives the receivers."""

    num_workers: int

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make every worker join the process group."""

    def start_weight_update(self) -> None:
        """Prepare every worker for new weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make every worker receive weights; returns when all have."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make every worker use the received weights, labelled with their version."""

    def received_weights(self) -> list[dict[str, TensorPrint]]:
        """Return the fingerprints of the tensors that arrived last, for each worker."""


class WeightSender:
    """Broadcasts streams of weights to all workers behind a control, bucket by bucket."""

    def __init__(
        self,
        control: WeightTransferControl,
        store: str,
        *,
        host: str = LOOPBACK,
        timeout: timedelta = TIMEOUT,
        **options: Any,
    ) -> None:
        """Open a process group with the workers; `options` go to them.

        `store`, `host` and `timeout` are those of `WeightGroup`.
        """
        self._control = control
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-weights")
        size = 1 + control.num_workers
        init_info = {"store": store, "size": size, "seconds": timeout.total_seconds(), **options}
        joined = self._executor.submit(control.init_weight_transfer_engine, init_info)
        self._group = WeightGroup(store, rank=0, size=size, host=host, timeout=timeout)
        joined.result()

    def send(self, stream: WeightStream, version: str) -> None:
        """Replace the weights of all workers by those of a stream."""
        self._control.start_weight_update()
        # the call blocks in the workers until the weights arrive
        received = self._executor.submit(self._control.update_weights, stream.plan.as_json())
        try:
            for bucket in stream:
                self._group.send(bucket, is_over=received.done)
        except GroupLostError:
            self.abandon()
            received.result()  # it may have a better reason
            raise
        received.result()
        self._control.finish_weight_update(version)

    def abandon(self) -> None:
        """Make all workers give up a pending transfer."""
        self._group.abandon()

    def close(self) -> None:
        """Leave the process group."""
        self._executor.shutdown(wait=False)
