"""The other ranks of a sharded learner as Ray workers. The loss of one ends the run."""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from klinic.cluster.addresses import free_port, interface_of, own_host
from klinic.cluster.crew import LOOK_EVERY, Crew
from klinic.cluster.session import Session


class RayFollowers:
    """The Ray workers of ranks 1 and up, on any node."""

    def __init__(self, crew: Crew, session: Session, files: Path, *, store_name: str) -> None:
        self._crew = crew
        self._session = session
        self._store = str(files / "learners")
        self._store_name = store_name
        self._refs: list[Any] = []
        self._over = threading.Event()
        self._environment: dict[str, str] = {}

    def start(self, num: int) -> None:
        """Start ranks 1 to `num - 1` and a thread that checks their heartbeats."""
        members = self._crew.ready(num=num - 1)
        if self._session.alone:
            meeting = {self._store_name: self._store}
        else:
            port = str(free_port(self._session.host))
            meeting = {"MASTER_ADDR": self._session.host, "MASTER_PORT": port}
        self._environment = {**meeting, "WORLD_SIZE": str(num)}
        for rank, member in enumerate(members, start=1):
            told = {**self._environment, "RANK": str(rank)}
            self._refs.append(self._crew.ask(member, "follow", told))
        self._environment = around(self._environment | {"RANK": "0"})
        os.environ |= self._environment
        threading.Thread(target=self._watch, daemon=True, name="klinic-learners").start()

    def stop(self) -> None:
        """Shut down the other ranks."""
        self._over.set()
        self._crew.close(after=self._refs)
        for name in self._environment:
            os.environ.pop(name, None)

    def _watch(self) -> None:
        """Kill a silent worker: the other ranks would wait for it forever."""
        while not self._over.wait(LOOK_EVERY):
            with suppress(Exception):  # the run or Ray has shut down
                self._crew.look()


def around(meeting: Mapping[str, str]) -> dict[str, str]:
    """Return the rendezvous environment of a rank, with the network interface of its node."""
    if "MASTER_ADDR" not in meeting:
        return dict(meeting)
    return {**meeting, "GLOO_SOCKET_IFNAME": interface_of(own_host(alone=False))}
