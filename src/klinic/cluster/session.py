"""Starts a local Ray for one run, or joins a running cluster; finds addresses and free ports."""

import fcntl
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from klinic.errors import ConfigError, MissingExtraError, WorkerLostError, first_line
from klinic.runtime.cleanup_process import start_cleanup_process
from klinic.runtime.process_tree import descendant_pids
from klinic.sampler.weight_group import LOOPBACK

SIOCGIFADDR = 0x8915  # Linux ioctl: the address of an interface


def local_address(*, is_local: bool) -> str:
    """Return this process's address: loopback for a single machine, else its node's IP."""
    if is_local:
        return LOOPBACK
    import ray

    return str(ray.util.get_node_ip_address())


def free_port(host: str) -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def interface_name(host: str) -> str:
    """Return the network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                address = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(address) == host:
                    return name
    return "lo"


STORE_BYTES = 2**28  # object store; completions pass through it, weights do not
LOCAL_ONLY_ENVIRONMENT = {
    # read at import of ray; without it, ray replaces 127.0.0.1 by an external address
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """A running Ray."""

    host: str
    """Address of this process for other nodes."""
    is_local: bool
    """Whether Ray runs on this machine only, reachable from loopback only."""


@contextmanager
def open_session(address: str | None, *, num_cpus: int, num_gpus: int) -> Iterator[RaySession]:
    """Start a local Ray on loopback, or join the cluster at an address; shut down at the end.

    Ray authenticates every call with a token. A local Ray gets a random one.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "cluster: ray was imported before klinic configured it, so its processes would not "
            "have the token. Import ray inside functions in your own files."
        )
    os.environ |= {**RAY_ENVIRONMENT, "RAY_AUTH_MODE": "token"}
    if address is None:
        os.environ |= LOCAL_ONLY_ENVIRONMENT
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once
    ray = _import_ray()
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # klinic reports failures itself
    init_options: dict[str, Any] = {"address": address, "namespace": "klinic"}
    if address is None:
        init_options |= {"address": "local", "num_cpus": num_cpus, "num_gpus": num_gpus}
        init_options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(**init_options, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises Exception if one of its processes starts too slowly
        if address is None:
            raise WorkerLostError(
                f"cluster: Ray cannot be started ({first_line(error)}). The machine may be too "
                "busy: try again. Ray's logs are in /tmp/ray/session_latest/logs."
            ) from error
        raise ConfigError(
            f"cluster.address is {address}: Ray cannot be joined ({first_line(error)}). Set it to "
            "a running head node, such as 10.0.0.1:6379, and RAY_AUTH_TOKEN to its token."
        ) from error
    try:
        is_local = address is None
        if is_local:  # two of Ray's helpers outlive a dead head node by a minute
            start_cleanup_process(pids=descendant_pids(os.getpid()))
        yield RaySession(host=local_address(is_local=is_local), is_local=is_local)
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            'cluster needs Ray, which is not installed here. Install it with: pip install "klinic'
            '[ray]". Or remove the cluster section: a single machine needs none.'
        ) from error
    return ray
