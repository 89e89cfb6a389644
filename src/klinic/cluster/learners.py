"""The other processes of a sharded learner, started by Ray. One that is lost ends the run."""

import fcntl
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from klinic.cluster.crew import LOOK_EVERY, Crew
from klinic.cluster.samplers import free_port
from klinic.cluster.session import Session

FAREWELL = 20.0  # seconds that a follower has to go when told to
SIOCGIFADDR = 0x8915  # of Linux: which address an interface has


class RayFollowers:
    """Followers that wait for this process, on whichever node they are."""

    def __init__(self, crew: Crew, session: Session, files: Path, *, store_name: str) -> None:
        self._crew = crew
        self._session = session
        self._store = str(files / "learners")
        self._store_name = store_name
        self._refs: list[Any] = []
        self._watching = threading.Event()
        self._environment: dict[str, str] = {}

    def start(self, num: int) -> None:
        """Let `num - 1` processes join this one, and watch over them."""
        members = self._crew.ready(num=num - 1)
        if self._session.alone:
            meeting = {self._store_name: self._store}
        else:
            port = str(free_port(self._session.host))
            meeting = {"MASTER_ADDR": self._session.host, "MASTER_PORT": port}
            meeting["GLOO_SOCKET_IFNAME"] = interface_of(self._session.host)
        self._environment = {**meeting, "RANK": "0", "WORLD_SIZE": str(num)}
        os.environ |= self._environment
        for rank, member in enumerate(members, start=1):
            told = {**self._environment, "RANK": str(rank)}
            self._refs.append(self._crew.ask(member, "follow", told))
        threading.Thread(target=self._watch, daemon=True, name="klinic-learners").start()

    def stop(self) -> None:
        """Let them go home, and see that they do."""
        self._watching.set()
        if self._refs:
            ray.wait(self._refs, num_returns=len(self._refs), timeout=FAREWELL)
        self._crew.close()
        for name in self._environment:
            os.environ.pop(name, None)

    def _watch(self) -> None:
        """Kill who falls silent: everybody would wait for it, and for ever."""
        while not self._watching.is_set():
            with suppress(Exception):  # the run is over, or Ray is
                self._crew.look()
            time.sleep(LOOK_EVERY)


def interface_of(host: str) -> str:
    """Return the network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, asked)[20:24]
                if socket.inet_ntoa(found) == host:
                    return name
    return "lo"
