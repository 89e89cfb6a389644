"""The worker processes that a recipe needs in addition to the driver, and their resources."""

from collections import Counter
from dataclasses import dataclass

from klinic.recipe.recipe import Recipe

SAMPLER, LEARNER, REWARDS = "sampler", "learner", "rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlacement:
    """Kind, number and resources of one worker process."""

    kind: str
    number: int
    cpus: int
    gpus: int

    @property
    def resource_bundle(self) -> dict[str, float]:
        """The Ray resource bundle to reserve."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})


def describe_placements(recipe: Recipe, placements: list[WorkerPlacement]) -> list[str]:
    """Describe the processes and their resources, one line per kind; empty without a cluster."""
    if recipe.cluster is None:
        return []
    address = recipe.cluster.address
    where = "this machine" if address is None else f"the Ray at {address}"
    counts = Counter(placement.kind for placement in placements)
    room = {placement.kind: placement.resource_bundle for placement in placements}
    lines = [f"Processes on {where}, in addition to the driver, which runs the loop and rank 0:"]
    for kind, count in counts.items():
        each = " and ".join(f"{amount:.0f} {what}" for what, amount in room[kind].items())
        lines.append(f"  {count} x {kind}, {each} each")
    return lines


def worker_placements(recipe: Recipe, *, gpus: bool) -> list[WorkerPlacement]:
    """Return the placements of all workers; learner rank 0 is the driver itself.

    `gpus`: whether samplers and learners get one GPU each.
    """
    cluster = recipe.cluster
    if cluster is None:
        return []
    counts = {
        SAMPLER: cluster.samplers,
        LEARNER: recipe.learner.shards - 1,
        REWARDS: cluster.reward_workers,
    }
    return [
        WorkerPlacement(
            kind=kind,
            number=number,
            cpus=recipe.threads or 1,
            gpus=int(gpus and kind != REWARDS),
        )
        for kind, count in counts.items()
        for number in range(count)
    ]
