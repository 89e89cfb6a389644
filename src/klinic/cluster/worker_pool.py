"""A pool of Ray workers of one kind: health checks, restart of dead or hung workers.

`map_over_pool` splits work into chunks and resubmits those of dead workers.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from klinic.cluster.placement import WorkerPlacement
from klinic.cluster.worker import start_actor
from klinic.errors import WorkerLostError, first_line

CHECK_INTERVAL = 0.5  # seconds between health checks
HEARTBEAT_TIMEOUT = 20.0  # seconds without a heartbeat after which a hung process is killed
START_TIMEOUT = 600.0  # seconds for a process to start and load the largest model
CLOSE_TIMEOUT = 20.0  # seconds that a process has to exit
MAX_LOST_IN_A_ROW = 10  # consecutive workers lost without a completed call
WORKER_DIED = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)

ReportEvent = Callable[[str], None]


class PooledWorkerLostError(Exception):
    """The worker died before it replied; resubmit to another."""


@dataclass(eq=False)
class PooledWorker:
    """The driver's handle of one worker."""

    handle: Any
    placement: WorkerPlacement
    build_ref: Any
    """Ray reference of the pending `build` call."""
    is_ready: bool = False
    pid: int | None = None
    node: str = ""
    heartbeat_ref: Any = None
    heartbeat_sent_at: float = 0.0

    def kill(self) -> None:
        """Kill the process, also one that is stopped and does not respond to Ray."""
        with suppress(Exception):
            ray.kill(self.handle, no_restart=True)
        if self.pid is not None and self.node == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class WorkerPool:
    """A pool with one worker per placement, all of one kind."""

    def __init__(
        self,
        placements: Sequence[WorkerPlacement],
        group: PlacementGroup,
        *,
        builder: str,
        build_arguments: Callable[[WorkerPlacement], dict[str, Any]],
        report_event: ReportEvent,
        replaces: bool = True,
    ) -> None:
        self._group = group
        self._builder = builder
        self._build_arguments = build_arguments
        self._report_event = report_event
        self._replaces = replaces
        self._lost_in_a_row = 0
        self.size = len(placements)
        self.workers = [self._start_worker(placement) for placement in placements]

    def wait_ready(self, *, num: int = 1) -> list[PooledWorker]:
        """Return the workers that have been built; wait until there are `num`."""
        begun = time.monotonic()
        while True:
            for member in list(self.workers):
                if not member.is_ready and _is_done(member.build_ref):
                    with suppress(PooledWorkerLostError):
                        self.get_result(member, member.build_ref)
                        member.is_ready = True
            self.check_heartbeats()
            ready_workers = [member for member in self.workers if member.is_ready]
            if len(ready_workers) >= num:
                return ready_workers
            self._check_start_timeout(time.monotonic() - begun)
            time.sleep(CHECK_INTERVAL)

    def _check_start_timeout(self, seconds: float) -> None:
        """Raise if no worker can start: no Ray node is alive, or the start timed out."""
        if seconds > START_TIMEOUT or not any(node["Alive"] for node in ray.nodes()):
            kind = self.workers[0].placement.kind if self.workers else "process"
            raise WorkerLostError(
                f"no {kind} has started after {seconds:.0f} seconds: Ray's own processes are dead, "
                "or its resources are exhausted. Continue with --resume."
            )

    def submit(self, member: PooledWorker, name: str, *arguments: Any) -> Any:
        """Submit a call to a worker; return the Ray reference of its result."""
        return member.handle.call.options(concurrency_group="work").remote(name, *arguments)

    def call_while_busy(self, member: PooledWorker, name: str) -> None:
        """Call a method of a busy worker, in its second thread, without waiting."""
        member.handle.call.options(concurrency_group="pulse").remote(name)

    def wait_first(self, refs: Sequence[Any]) -> Any:
        """Return the first reference that completes or whose worker died."""
        while True:
            there, _ = ray.wait(list(refs), num_returns=1, timeout=CHECK_INTERVAL)
            if there:
                return there[0]
            self.check_heartbeats()

    def get_result(self, member: PooledWorker, ref: Any) -> Any:
        """Return the result of a call; re-raise the worker's exception."""
        try:
            value = ray.get(ref)
        except WORKER_DIED as error:
            self.replace_worker(member, f"its process has ended ({_error_reason(error)})")
            raise PooledWorkerLostError from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        self._lost_in_a_row = 0
        return value

    def check_heartbeats(self) -> None:
        """Check heartbeats; replace workers that have been silent for too long."""
        now = time.monotonic()
        for member in [member for member in self.workers if member.is_ready]:
            if member.heartbeat_ref is None:
                heartbeat_ref = member.handle.pulse.options(concurrency_group="pulse").remote()
                member.heartbeat_ref, member.heartbeat_sent_at = heartbeat_ref, now
            elif _is_done(member.heartbeat_ref):
                with suppress(*WORKER_DIED):  # `answer` reports the loss
                    member.pid, member.node = ray.get(member.heartbeat_ref)
                member.heartbeat_ref = None
            elif now - member.heartbeat_sent_at > HEARTBEAT_TIMEOUT:
                self.replace_worker(
                    member, f"it has been silent for {HEARTBEAT_TIMEOUT:.0f} seconds"
                )

    def replace_worker(self, member: PooledWorker, why: str) -> None:
        """Kill a worker and start a replacement."""
        if member not in self.workers:
            return
        self._lost_in_a_row += 1
        kind, number = member.placement.kind, member.placement.number + 1
        if self._lost_in_a_row > MAX_LOST_IN_A_ROW:
            raise WorkerLostError(
                f"{MAX_LOST_IN_A_ROW} processes in a row were lost, the last {kind} because {why}."
                " Check the machine's memory. Continue with --resume."
            )
        member.kill()
        at = self.workers.index(member)
        if self._replaces:
            self.workers[at] = self._start_worker(member.placement)
        else:
            del self.workers[at]
        self._report_event(f"Lost {kind} {number} of {self.size}: {why}.")

    def close(self, *, after: Sequence[Any] = ()) -> None:
        """Kill all workers, once the calls in `after` are done or timed out."""
        if after:
            ray.wait(list(after), num_returns=len(after), timeout=CLOSE_TIMEOUT)
        for member in self.workers:
            member.kill()

    def _start_worker(self, placement: WorkerPlacement) -> PooledWorker:
        # the bundle: a replacement gets the GPU of its predecessor, and no worker the driver's
        within = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=placement.bundle
        )
        room = {
            "num_cpus": placement.cpus,
            "num_gpus": placement.gpus,
            "scheduling_strategy": within,
        }
        handle = start_actor(placement.kind, **room)
        built = handle.build.options(concurrency_group="work").remote(
            self._builder, self._build_arguments(placement)
        )
        return PooledWorker(handle=handle, placement=placement, build_ref=built)


def _is_done(ref: Any) -> bool:
    there, _ = ray.wait([ref], timeout=0)
    return bool(there)


def _error_reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return first_line(cause)[:160].rstrip(".")


def map_over_pool(
    pool: WorkerPool,
    name: str,
    chunks: Sequence[Any],
    *more: Any,
    available: Callable[[], list[PooledWorker]],
) -> list[Any]:
    """Return the result of every chunk; the chunk of a dead worker is resubmitted to another.

    `available` returns the workers that can take work, and waits until there is one.
    """
    done: dict[int, Any] = {}
    running: dict[Any, tuple[int, PooledWorker]] = {}
    while len(done) < len(chunks):
        taken = {number for number, _ in running.values()} | done.keys()
        busy = [member for _, member in running.values()]
        open_ = [number for number in range(len(chunks)) if number not in taken]
        idle = [member for member in available() if member not in busy] if open_ else []
        for number, member in zip(open_, idle, strict=False):
            running[pool.submit(member, name, chunks[number], *more)] = number, member
        ref = pool.wait_first(list(running))
        number, member = running.pop(ref)
        with suppress(PooledWorkerLostError):
            done[number] = pool.get_result(member, ref)
    return [done[number] for number in range(len(chunks))]


def split_evenly(items: Sequence[Any], num: int) -> Iterator[Sequence[Any]]:
    """Yield `num` contiguous chunks of nearly equal size, none empty.

    >>> list(split_evenly([1, 2, 3, 4, 5], 2)), list(split_evenly([1], 2))
    ([[1, 2, 3], [4, 5]], [[1]])
    """
    num = min(num, len(items))
    small, rest = divmod(len(items), num) if num else (0, 0)
    at = 0
    for share in range(num):
        size = small + (share < rest)
        yield items[at : at + size]
        at += size
