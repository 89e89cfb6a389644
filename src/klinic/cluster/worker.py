"""The Ray actor: builds one component of a run and calls its methods for the driver.

The component is named as `module:function` with JSON arguments. A second thread answers
heartbeats while the component is busy.
"""

import importlib
import os
from typing import Any

import ray

from klinic.cluster.placement import LEARNER, REWARDS, SAMPLER


class Worker:
    """Holds a component. It imports nothing heavy before `build`."""

    def __init__(self) -> None:
        self._component: Any = None

    def pulse(self) -> tuple[int, str]:
        """Heartbeat: return the process id and the node id."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def build(self, builder: str, arguments: dict[str, Any]) -> None:
        """Build the component, in the thread that will use it."""
        module, _, name = builder.partition(":")
        self._component = getattr(importlib.import_module(module), name)(**arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the component."""
        return getattr(self._component, name)(*arguments)


# one class per kind: `ps` and Ray's tools show the class name
class SamplerWorker(Worker):
    """A sampler process."""


class LearnerWorker(Worker):
    """A rank of the sharded learner."""


class RewardsWorker(Worker):
    """A process that calls reward functions."""


KINDS = {SAMPLER: SamplerWorker, LEARNER: LearnerWorker, REWARDS: RewardsWorker}


def start_actor(kind: str, **resources: Any) -> Any:
    """Start a Ray actor of a kind with these resources; return its handle."""
    # one thread for the work, one for heartbeats
    return ray.remote(concurrency_groups={"work": 1, "pulse": 1}, **resources)(KINDS[kind]).remote()
