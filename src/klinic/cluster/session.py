"""Starts a local Ray for one run, or joins a running cluster."""

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from klinic.cluster.addresses import own_host
from klinic.errors import ConfigError, MissingExtraError, WorkerLostError, first_line
from klinic.orphans import descendants
from klinic.undertaker import when_this_dies

STORE_BYTES = 2**28  # object store; completions pass through it, weights do not
ALONE = {
    # read at import of ray; without it, ray replaces 127.0.0.1 by an external address
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A running Ray."""

    host: str
    """Address of this process for other nodes."""
    alone: bool
    """Whether Ray runs on this machine only, reachable from loopback only."""


@contextmanager
def opened(address: str | None, *, num_cpus: int, num_gpus: int) -> Iterator[Session]:
    """Start a local Ray on loopback, or join the cluster at an address; shut down at the end.

    Ray authenticates every call with a token. A local Ray gets a random one.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "cluster: ray was imported before klinic configured it, so its processes would not "
            "have the token. Import ray inside functions in your own files."
        )
    os.environ |= {**QUIET, "RAY_AUTH_MODE": "token"}
    if address is None:
        os.environ |= ALONE
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once
    ray = _ray()
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # klinic reports failures itself
    how: dict[str, Any] = {"address": address, "namespace": "klinic"}
    if address is None:
        how |= {"address": "local", "num_cpus": num_cpus, "num_gpus": num_gpus}
        how |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(**how, log_to_driver=False, configure_logging=False)
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
        alone = address is None
        if alone:  # two of Ray's helpers outlive a dead head node by a minute
            when_this_dies(end=descendants(os.getpid()))
        yield Session(host=own_host(alone=alone), alone=alone)
    finally:
        ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            'cluster needs Ray, which is not installed here. Install it with: pip install "klinic'
            '[ray]". Or remove the cluster section: a single machine needs none.'
        ) from error
    return ray
