"""Which processes a recipe asks for beside the first, and what each of them takes."""

from collections import Counter
from dataclasses import dataclass

from klinic.recipe.recipe import Recipe

SAMPLER, LEARNER, REWARDS = "sampler", "learner", "rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Room for one process."""

    kind: str
    number: int
    cpus: int
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """What is reserved for it, in Ray's words."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})


def sentences(recipe: Recipe, places: list[Place]) -> list[str]:
    """Return who there will be and what they reserve, a line a kind; nothing without a cluster."""
    if recipe.cluster is None:
        return []
    address = recipe.cluster.address
    where = "this machine" if address is None else f"the Ray at {address}"
    counts = Counter(place.kind for place in places)
    room = {place.kind: place.bundle for place in places}
    lines = [f"Processes on {where}, beside the first, which runs the loop and is a learner:"]
    for kind, count in counts.items():
        each = " and ".join(f"{amount:.0f} {what}" for what, amount in room[kind].items())
        lines.append(f"  {count} x {kind}, {each} each")
    return lines


def placement(recipe: Recipe, *, gpus: bool) -> list[Place]:
    """Return a place for every process that is started; the first learner leads where it is.

    `gpus` is whether samplers and learners get one each.
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
        Place(
            kind=kind,
            number=number,
            cpus=recipe.threads or 1,
            gpus=int(gpus and kind != REWARDS),
        )
        for kind, count in counts.items()
        for number in range(count)
    ]
