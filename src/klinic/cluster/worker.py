"""One process of a cluster: it holds a part of a run, and does what the first process asks of it.

What the part is, it is told by name: `module:function` with plain values. A second thread answers
whether the process still lives, whatever the part is busy with.
"""

import importlib
import os
from typing import Any

import ray

from klinic.cluster.placement import LEARNER, REWARDS, SAMPLER


class Worker:
    """What a worker is asked for. It imports nothing heavy before it knows its part."""

    def __init__(self) -> None:
        self._part: Any = None

    def pulse(self) -> tuple[int, str]:
        """Say that this process lives: which it is, and on which node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def build(self, maker: str, told: dict[str, Any]) -> None:
        """Make the part, in the thread that will use it."""
        module, _, name = maker.partition(":")
        self._part = getattr(importlib.import_module(module), name)(**told)

    def call(self, name: str, *arguments: Any) -> Any:
        """Let the part do something."""
        return getattr(self._part, name)(*arguments)


# one class a kind: this is what `ps` and Ray's own tools show
class SamplerWorker(Worker):
    """A process that samples."""


class LearnerWorker(Worker):
    """A process that shares the learner."""


class RewardsWorker(Worker):
    """A process that calls reward functions."""


KINDS = {SAMPLER: SamplerWorker, LEARNER: LearnerWorker, REWARDS: RewardsWorker}


def worker(kind: str, **room: Any) -> Any:
    """Start a worker in some room of the cluster; return how to ask it."""
    # one thread for the work, and one to say that the process lives
    return ray.remote(concurrency_groups={"work": 1, "pulse": 1}, **room)(KINDS[kind]).remote()
