"""The Ray session and worker pools of a run with several processes."""

import tempfile
from collections import deque
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from klinic.cluster.placement import LEARNER, REWARDS, SAMPLER, Place, placement
from klinic.cluster.session import opened
from klinic.errors import ConfigError
from klinic.evidence.rollout import Rollout
from klinic.loop.folder import ENGINE_LOG
from klinic.model.loading import Policy
from klinic.model.weights import trained
from klinic.recipe.recipe import Recipe
from klinic.rewards.scores import Scores, joined
from klinic.sampler.protocol import Sampler
from klinic.sampler.weight_group import in_memory
from klinic.undertaker import when_this_dies

ROOM = "klinic.loop.remote"  # module with the worker factories
WAIT = 120.0  # seconds to wait for resources of a shared cluster


class Clustered:
    """The worker processes of a run: samplers, learner ranks, reward functions."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        if recipe.cluster is None:
            raise ValueError("this recipe has no cluster")
        self.section = recipe.cluster
        self.news: deque[str] = deque()
        """Messages about lost and replaced workers that the run has not logged yet."""
        self._told = {"recipe": recipe.plain()}
        self._folder = folder
        self._rewards: Any = None
        self._places = placement(recipe, gpus=torch.cuda.is_available())
        cpus = sum(place.cpus for place in self._places)
        gpus = sum(place.gpus for place in self._places)
        with ExitStack() as opening:
            ray = opened(self.section.address, num_cpus=cpus, num_gpus=gpus)
            self._session = opening.enter_context(ray)
            files = tempfile.TemporaryDirectory(prefix="klinic-cluster-", dir=in_memory())
            self._files = Path(opening.enter_context(files))
            when_this_dies(delete=[self._files])
            self._group = self._reserved()
            self._open = opening.pop_all()

    def sampler(self, policy: Policy, where: str) -> Sampler:
        """Return a sampler that spreads prompts over all sampler workers."""
        from klinic.cluster.samplers import SharedSampler

        def told(place: Place) -> dict[str, Any]:
            log = self._folder / f"{Path(ENGINE_LOG).stem}-{place.number}.log"
            return {**self._told, "where": where, "log": str(log)}

        crew = self._crew(SAMPLER, "host_sampler", told)
        self._live = trained(policy.lm)
        self._sent = self._live
        if self.section.max_staleness:  # training must not change weights in transfer
            self._sent = {name: p.detach().clone() for name, p in self._live.items()}
        return SharedSampler(crew, self._sent, self._session, self._files)

    @torch.no_grad()
    def freeze(self) -> None:
        """Copy the policy's current weights into the buffer that is sent to samplers."""
        if self._sent is not self._live:
            for name, p in self._live.items():
                self._sent[name].copy_(p)

    def followers(self, store_name: str) -> Any:
        """Return the other ranks of the learner."""
        from klinic.cluster.learners import RayFollowers

        crew = self._crew(LEARNER, "HostedFollower", lambda _: {}, replaces=False)
        return RayFollowers(crew, self._session, self._files, store_name=store_name)

    def scores(self, rollouts: list[Rollout]) -> Scores:
        """Return the rewards of rollouts, computed by the reward workers."""
        from klinic.cluster.shares import shared, split

        if self._rewards is None:
            self._rewards = self._crew(REWARDS, "HostedRewards", lambda _: self._told)
        # a reward function may compare the completions of a prompt: groups stay together
        by_prompt = [list(group) for _, group in groupby(rollouts, lambda r: r.prompt.index)]
        shares = [list(chain(*groups)) for groups in split(by_prompt, self._rewards.size)]
        return joined(shared(self._rewards, "score", shares, able=self._rewards.ready))

    def close(self) -> None:
        """Stop all workers that this run started."""
        self._open.close()

    def _crew(self, kind: str, maker: str, told: Any, *, replaces: bool = True) -> Any:
        from klinic.cluster.crew import Crew

        return Crew(
            [place for place in self._places if place.kind == kind],
            self._group,
            maker=f"{ROOM}:{maker}",
            told=told,
            news=self.news.append,
            replaces=replaces,
        )

    def _reserved(self) -> Any:
        """Reserve resources for every worker, spread over the nodes."""
        import ray
        from ray.util.placement_group import placement_group

        group = placement_group([place.bundle for place in self._places], strategy="SPREAD")
        if not group.wait(WAIT):
            free = {k: v for k, v in ray.available_resources().items() if k in {"CPU", "GPU"}}
            needed = len(self._places)
            raise ConfigError(
                f"cluster needs resources for {needed} processes ({self._places[0].bundle} each), "
                f"but Ray at {self.section.address} has {free} "
                "free. Use fewer processes, set threads lower, or add nodes."
            )
        return group
