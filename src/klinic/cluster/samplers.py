"""A sampler backed by a worker pool: each worker has the weights and samples a chunk of prompts.

The driver broadcasts weights to all workers, or to their engines, in a process group of their own,
not through Ray or a disk. The group is made anew when a worker is lost or replaced.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klinic.cluster.session import RaySession, free_port
from klinic.cluster.worker_pool import (
    PooledWorker,
    PooledWorkerLostError,
    WorkerPool,
    map_over_pool,
    split_evenly,
)
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.policy_source import WeightSource
from klinic.model.tensor_prints import TensorPrint, describe_damage
from klinic.model.weights import Weights
from klinic.sampler.protocol import LoadResult
from klinic.sampler.vllm.sync_check import SyncProbe
from klinic.sampler.weight_group import CONNECT_TIMEOUT, TCP, GroupLostError
from klinic.sampler.weight_sender import WeightSender


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSync:
    """What a weight sync to engines needs beyond one to sampler processes."""

    dtype: torch.dtype | None
    """The dtype of their weights; None where they get adapters."""
    probe: SyncProbe


class PooledSampler:
    """Samples completions with a pool of sampler workers."""

    def __init__(
        self,
        pool: WorkerPool,
        source: WeightSource,
        session: RaySession,
        files: Path,
        *,
        engines: EngineSync | None = None,
    ) -> None:
        self._receivers = _PooledReceivers(pool)
        self._pool = pool
        self._source = source
        self._session = session
        self._store_files = (files / f"weights-{number}" for number in itertools.count())
        self._engines = engines
        self._is_greedy = False

    def load(self, weights: Weights) -> LoadResult:
        """Send the weights to all workers; return the result with the largest deviation."""
        if self._receivers.sender is None:
            self._pool.wait_ready(num=self._pool.size)
        return self._deliver_weights(weights)

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt."""
        for groups in self._map_chunks("sample", prompts, step):
            yield from groups

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its segments."""
        return [rollout for part in self._map_chunks("extend", rollouts, step) for rollout in part]

    def greedy(self) -> "PooledSampler":
        """Return a sampler of the most likely completion of each prompt, on the same weights."""
        view = copy.copy(self)
        view._is_greedy = True
        return view

    def close(self) -> None:
        """End the samplers."""
        self._receivers.disconnect()
        ready = [member for member in self._pool.workers if member.is_ready]
        self._pool.close(after=[self._pool.submit(member, "close") for member in ready])

    def _map_chunks(self, name: str, items: Sequence[Any], step: int) -> list[Any]:
        # chunks do not depend on which workers are alive, so neither do the completions
        shares = list(split_evenly(items, self._pool.size))
        return map_over_pool(
            self._pool,
            name,
            shares,
            step,
            self._is_greedy,
            available=self._workers_with_weights,
        )

    def _workers_with_weights(self) -> list[PooledWorker]:
        """Return the workers with weights; if none is left, send the current ones to new ones."""
        if not self._receivers.live_members():
            with self._source.hold_weights():
                self._deliver_weights(self._source.publish())
        return self._receivers.live_members()

    def _deliver_weights(self, weights: Weights) -> LoadResult:
        while True:
            members = self._pool.wait_ready()
            try:
                if members != self._receivers.members:
                    self._connect(members)
                return self._send_weights(weights)
            except (PooledWorkerLostError, GroupLostError):
                self._receivers.disconnect()

    def _connect(self, members: list[PooledWorker]) -> None:
        """Open a process group with these workers."""
        host = self._session.host
        if self._session.is_local:
            store = str(next(self._store_files))
        else:
            store = f"{TCP}{host}:{free_port(host)}"
        self._receivers.connect(members, store, host=host, is_local=self._session.is_local)

    def _send_weights(self, weights: Weights) -> LoadResult:
        receivers, engines = self._receivers, self._engines
        assert receivers.sender is not None  # noqa: S101 - connected before
        dtype = None if engines is None else engines.dtype
        with self._source.stream_weights(dtype) as stream:
            receivers.sender.send(stream, f"{weights.version} {weights.fingerprint}")
        damage = describe_damage(stream.fingerprints, receivers.received_weights())
        requests = [] if engines is None else engines.probe.make_requests()
        outputs = receivers.call_all("use_weights", weights, requests)
        gaps: dict[str, float] = {}
        if engines is not None:
            answers = [engines.probe.measure_gaps(requests, o, self._source) for o in outputs]
            gaps = max(answers, key=_largest_gap)
        return LoadResult(fingerprint=weights.fingerprint, sync_gaps=gaps, damage=damage)


class _PooledReceivers:
    """The receivers of all connected workers, as one weight-transfer control."""

    num_workers = 0

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.members: list[PooledWorker] = []
        self.sender: WeightSender | None = None

    def live_members(self) -> list[PooledWorker]:
        """Return the connected workers that are alive."""
        return [member for member in self.members if member in self._pool.workers]

    def connect(
        self, members: list[PooledWorker], store: str, *, host: str, is_local: bool
    ) -> None:
        """Open a process group with these workers."""
        self.disconnect()
        self.members = members
        self._counts = self.call_all("count_receivers")
        self.num_workers = sum(self._counts)
        self.sender = WeightSender(
            self, store, host=host, timeout=CONNECT_TIMEOUT, is_local=is_local
        )

    def disconnect(self) -> None:
        """Leave the group."""
        if self.sender is not None:
            self.sender.close()
        self.members, self.sender = [], None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make every receiver join the process group."""
        first_ranks = itertools.accumulate(self._counts, initial=1)
        refs = {
            self._pool.submit(member, "join", {**init_info, "first_rank": first}): member
            for member, first in zip(self.members, first_ranks, strict=False)
        }
        self._gather_results(refs)

    def start_weight_update(self) -> None:
        """Prepare every receiver for new weights."""
        self.call_all("call_receiver", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make every receiver receive weights."""
        self.call_all("call_receiver", "update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make every receiver use the received weights."""
        self.call_all("call_receiver", "finish_weight_update", weight_version)

    def received_weights(self) -> list[dict[str, TensorPrint]]:
        """Return the fingerprints of the tensors that arrived last, for each receiver."""
        results = self.call_all("call_receiver", "received_weights")
        return [prints for result in results for prints in result]

    def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every connected worker."""
        refs = {self._pool.submit(member, name, *arguments): member for member in self.members}
        return self._gather_results(refs)

    def _gather_results(self, refs: dict[Any, PooledWorker]) -> list[Any]:
        """Return all results; if a worker is lost, raise after the others have replied."""
        left, results, lost = dict(refs), dict[Any, Any](), None
        while left:
            ref = self._pool.wait_first(list(left))
            try:
                results[ref] = self._pool.get_result(left.pop(ref), ref)
            except (PooledWorkerLostError, GroupLostError) as error:
                lost = error
                if self.sender is not None:
                    self.sender.abandon()
        if lost is not None:
            raise lost
        return [results[ref] for ref in refs]


def _largest_gap(answer: Mapping[str, Any]) -> float:
    return float(max(answer.get("repeated", 0.0), answer.get("fresh", 0.0)))
