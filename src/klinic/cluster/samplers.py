"""A sampler backed by a worker pool: each worker has the weights and samples a chunk of prompts.

The driver sends weights to all workers over a separate link, not through Ray or a disk. The link is
reopened when a worker is lost or replaced.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from klinic.cluster.session import RaySession, free_port
from klinic.cluster.weight_links import GroupLostError, WeightLink, open_link
from klinic.cluster.worker_pool import (
    PooledWorker,
    PooledWorkerLostError,
    WorkerPool,
    map_over_pool,
    split_evenly,
)
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.weights import Weights
from klinic.sampler.protocol import LoadResult
from klinic.sampler.weight_group import TCP


class PooledSampler:
    """Samples completions with a pool of sampler workers."""

    def __init__(
        self, pool: WorkerPool, tensors: Mapping[str, Tensor], session: RaySession, files: Path
    ) -> None:
        self._pool = pool
        self._tensors = tensors
        self._session = session
        self._files = files
        self._link: WeightLink | None = None
        self._linked_workers: list[PooledWorker] = []
        self._weights: Weights | None = None

    def load(self, weights: Weights) -> LoadResult:
        """Send the weights to all workers; return the result with the largest deviation."""
        self._weights = weights
        if self._link is None:
            self._pool.wait_ready(num=self._pool.size)
        return self._deliver_weights()

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt."""
        for groups in self._map_chunks("sample", prompts, step):
            yield from groups

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its segments."""
        return [rollout for part in self._map_chunks("extend", rollouts, step) for rollout in part]

    def close(self) -> None:
        """End the samplers."""
        self._link = None
        ready = [member for member in self._pool.workers if member.is_ready]
        self._pool.close(after=[self._pool.submit(member, "close") for member in ready])

    def _map_chunks(self, name: str, items: Sequence[Any], step: int) -> list[Any]:
        # chunks do not depend on which workers are alive, so neither do the completions
        shares = list(split_evenly(items, self._pool.size))
        return map_over_pool(self._pool, name, shares, step, available=self._workers_with_weights)

    def _workers_with_weights(self) -> list[PooledWorker]:
        """Return the workers with the current weights; if none is left, send them to new ones."""
        if not self._live_linked_workers():
            self._deliver_weights()
        return self._live_linked_workers()

    def _live_linked_workers(self) -> list[PooledWorker]:
        return [member for member in self._linked_workers if member in self._pool.workers]

    def _deliver_weights(self) -> LoadResult:
        while True:
            members = self._pool.wait_ready()
            try:
                if members != self._linked_workers:
                    self._open_link_to(members)
                return self._send_weights()
            except (PooledWorkerLostError, GroupLostError):
                self._link, self._linked_workers = None, []

    def _open_link_to(self, members: list[PooledWorker]) -> None:
        """Open a weight link to these workers."""
        self._link, self._linked_workers = None, []
        size, host = 1 + len(members), self._session.host
        store = str(self._files / "weights")
        if not self._session.is_local:
            store = f"{TCP}{host}:{free_port(host)}"
        refs = {
            self._pool.submit(member, "join", store, rank, size): member
            for rank, member in enumerate(members, start=1)
        }
        opened = _run_in_background(lambda: open_link(store, self._tensors, rank=0, size=size))
        self._gather_results(refs)
        self._link, self._linked_workers = opened.result(), members

    def _send_weights(self) -> LoadResult:
        link, tensors, weights = self._link, self._tensors, self._weights
        if link is None:
            raise GroupLostError("there is no link to send weights to")
        if self._session.is_local:  # shared memory: write before workers read
            link.send(tensors)
        else:
            _run_in_background(lambda: link.send(tensors))
        refs = {
            self._pool.submit(member, "load", weights): member for member in self._linked_workers
        }
        results = self._gather_results(refs)
        fingerprints = " and ".join(sorted({one.fingerprint for one in results}))
        worst = max((one.sync_gaps for one in results), key=_sync_gap)
        return LoadResult(fingerprint=fingerprints, sync_gaps=worst)

    def _gather_results(self, refs: dict[Any, PooledWorker]) -> list[Any]:
        """Return all results; if a worker is lost, raise after the others have replied."""
        left, results, lost = dict(refs), [], None
        while left:
            ref = self._pool.wait_first(list(left))
            try:
                results.append(self._pool.get_result(left.pop(ref), ref))
            except (PooledWorkerLostError, GroupLostError) as error:
                lost = error
                self._link = None
                for member in left.values():  # abort their pending receives
                    self._pool.call_while_busy(member, "leave")
        if lost is not None:
            raise lost
        return results


def _sync_gap(answer: Mapping[str, Any]) -> float:
    return float(max(answer.get("repeated", 0.0), answer.get("fresh", 0.0)))


def _run_in_background(work: Callable[[], Any]) -> "Future[Any]":
    """Run `work` in a daemon thread: it may block forever on a dead worker."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except RuntimeError as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="klinic-weights").start()
    return done
