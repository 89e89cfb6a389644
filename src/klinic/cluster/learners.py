"""The other processes of a sharded learner, started by Ray. One that is lost ends the run."""

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
    """Followers that wait for this process, on whichever node they are."""

    def __init__(self, crew: Crew, session: Session, files: Path, *, store_name: str) -> None:
        self._crew = crew
        self._session = session
        self._store = str(files / "learners")
        self._store_name = store_name
        self._refs: list[Any] = []
        self._over = threading.Event()
        self._environment: dict[str, str] = {}

    def start(self, num: int) -> None:
        """Let `num - 1` processes join this one, and watch over them."""
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
        """Let them go home, and see that they do."""
        self._over.set()
        self._crew.close(after=self._refs)
        for name in self._environment:
            os.environ.pop(name, None)

    def _watch(self) -> None:
        """Kill who falls silent: everybody would wait for it, and for ever."""
        while not self._over.wait(LOOK_EVERY):
            with suppress(Exception):  # the run is over, or Ray is
                self._crew.look()


def around(meeting: Mapping[str, str]) -> dict[str, str]:
    """Return what a process needs around it to meet the others, from the node that it is on."""
    if "MASTER_ADDR" not in meeting:
        return dict(meeting)
    return {**meeting, "GLOO_SOCKET_IFNAME": interface_of(own_host(alone=False))}
