"""Ray itself: started for one run on this machine alone, or joined where it is running."""

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

STORE_BYTES = 2**28  # of Ray's object store: completions pass through it, weights never do
ALONE = {
    # read when ray is imported: without it 127.0.0.1 becomes an address that others can reach
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A Ray that is running."""

    host: str
    """Where the other nodes reach this process."""
    alone: bool
    """Whether all of it is on this machine, reachable from nowhere else."""


@contextmanager
def opened(address: str | None, *, num_cpus: int, num_gpus: int) -> Iterator[Session]:
    """Start a Ray that nobody else can reach, or join the one at an address; leave it at the end.

    Every call into either needs a token. A Ray of its own has one that only its processes know.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "cluster: something has imported ray before klinic could set it up, so its processes "
            "would not know their token. Import it inside of functions, in files of yours."
        )
    os.environ |= {**QUIET, "RAY_AUTH_MODE": "token"}
    if address is None:
        os.environ |= ALONE
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once
    ray = _ray()
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # what has happened, klinic says
    how: dict[str, Any] = {"address": address, "namespace": "klinic"}
    if address is None:
        how |= {"address": "local", "num_cpus": num_cpus, "num_gpus": num_gpus}
        how |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(**how, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises this very class where a process of its own is slow
        if address is None:
            raise WorkerLostError(
                f"cluster: Ray cannot be started ({first_line(error)}). A very busy machine "
                "is too slow for it: try again. What Ray says is in /tmp/ray/session_latest/logs."
            ) from error
        raise ConfigError(
            f"cluster.address is {address}: Ray cannot be joined ({first_line(error)}). An address "
            "is that of a running head node, such as 10.0.0.1:6379, and RAY_AUTH_TOKEN its token."
        ) from error
    try:
        alone = address is None
        if alone:  # two of its helpers look for a dead head node for a minute
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
            '[ray]". Or leave the cluster section out: one machine needs none.'
        ) from error
    return ray
