"""The processes that a recipe needs, and the resources that Ray reserves for each."""

from collections import Counter
from dataclasses import dataclass

from klinic.recipe.recipe import Recipe

SAMPLER, LEARNER, REWARDS = "sampler", "learner", "rewards"
DRIVER = "driver"  # no Ray worker, but its learner rank needs a GPU that no worker gets


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlacement:
    """Kind, number and resources of one process."""

    kind: str
    number: int
    cpus: int
    gpus: int
    bundle: int
    """Index of its resource bundle in the run's placement group."""

    @property
    def resource_bundle(self) -> dict[str, float]:
        """The Ray resource bundle to reserve."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: float(amount) for name, amount in amounts.items() if amount}


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
        lines.append(
            f"  the driver, {each}" if kind == DRIVER else f"  {count} x {kind}, {each} each"
        )
    return lines


def worker_placements(recipe: Recipe, *, gpus: bool) -> list[WorkerPlacement]:
    """Return the placements of all processes; learner rank 0 is the driver itself.

    `gpus`: whether driver and learners get one GPU each, samplers those of their engine.
    """
    cluster = recipe.cluster
    if cluster is None:
        return []
    counts = {
        DRIVER: int(gpus),  # its cores are not Ray's: it starts before Ray
        SAMPLER: cluster.samplers,
        LEARNER: recipe.learner.num_ranks - 1,
        REWARDS: cluster.reward_workers,
    }
    num_gpus = {DRIVER: 1, SAMPLER: recipe.sampler.tensor_parallel_size, LEARNER: 1, REWARDS: 0}
    kinds = [(kind, number) for kind, count in counts.items() for number in range(count)]
    return [
        WorkerPlacement(
            kind=kind,
            number=number,
            cpus=0 if kind == DRIVER else recipe.threads or 1,
            gpus=num_gpus[kind] if gpus else 0,
            bundle=bundle,
        )
        for bundle, (kind, number) in enumerate(kinds)
    ]
