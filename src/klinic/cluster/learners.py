"""The other ranks of a sharded learner as Ray workers. The loss of one ends the run."""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from klinic.cluster.session import RaySession, free_port, interface_name, local_address
from klinic.cluster.worker_pool import CHECK_INTERVAL, WorkerPool


class RayLearnerWorkers:
    """The Ray workers of ranks 1 and up, on any node."""

    def __init__(
        self,
        pool: WorkerPool,
        session: RaySession,
        files: Path,
        *,
        store_name: str,
        device_index: int | None,
    ) -> None:
        """Take the pool of the other ranks; `device_index` is the GPU of rank 0, None on a CPU."""
        self._pool = pool
        self._session = session
        self._store = str(files / "learners")
        self._store_name = store_name
        self._device_index = device_index
        self._refs: list[Any] = []
        self._stopped = threading.Event()
        self._environment: dict[str, str] = {}

    def start(self, num: int) -> None:
        """Start ranks 1 to `num - 1` and a thread that checks their heartbeats."""
        members = self._pool.wait_ready(num=num - 1)
        if self._session.is_local:
            meeting = {self._store_name: self._store}
        else:
            port = str(free_port(self._session.host))
            meeting = {"MASTER_ADDR": self._session.host, "MASTER_PORT": port}
        self._environment = {**meeting, "WORLD_SIZE": str(num)}
        for rank, member in enumerate(members, start=1):
            environment = {**self._environment, "RANK": str(rank)}
            self._refs.append(self._pool.submit(member, "run_rank", environment))
        self._environment = rendezvous_environment(self._environment | {"RANK": "0"})
        if self._device_index is not None:
            self._environment["LOCAL_RANK"] = str(self._device_index)
        os.environ |= self._environment
        threading.Thread(target=self._check_workers, daemon=True, name="klinic-learners").start()

    def stop(self) -> None:
        """Shut down the other ranks."""
        self._stopped.set()
        self._pool.close(after=self._refs)
        for name in self._environment:
            os.environ.pop(name, None)

    def _check_workers(self) -> None:
        """Kill a silent worker: the other ranks would wait for it forever."""
        while not self._stopped.wait(CHECK_INTERVAL):
            with suppress(Exception):  # the run or Ray has shut down
                self._pool.check_heartbeats()


def rendezvous_environment(rendezvous: Mapping[str, str]) -> dict[str, str]:
    """Return the rendezvous environment of a rank, with the network interface of its node."""
    if "MASTER_ADDR" not in rendezvous:
        return dict(rendezvous)
    return {**rendezvous, "GLOO_SOCKET_IFNAME": interface_name(local_address(is_local=False))}
