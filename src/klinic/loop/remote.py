"""Factories of Ray workers, each built from the recipe and plain values."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klinic.cluster.hosted import HostedSampler
from klinic.cluster.learners import around
from klinic.evidence.rollout import Rollout
from klinic.loop.assembly import make_sampler
from klinic.loop.shards import follow_leader
from klinic.loop.source import Given, find_source
from klinic.loop.train import settle
from klinic.model.loading import load_policy
from klinic.recipe.recipe import Recipe
from klinic.rewards.runner import score
from klinic.rewards.scores import Scores


def host_sampler(*, recipe: dict[str, Any], where: str, log: str) -> HostedSampler:
    """Return a sampler worker with its own copy of the start policy."""
    asked = Recipe.model_validate(recipe)
    settle(asked)
    section = asked.model.model_copy(update={"name": where})
    policy = load_policy(section, temperature=asked.sampling.temperature, seed=asked.seed)
    return HostedSampler(policy, make_sampler(asked, policy, log=Path(log)))


class HostedFollower:
    """A learner rank in a Ray worker."""

    def follow(self, environment: Mapping[str, str]) -> None:
        """Execute calls from rank 0 until it stops or dies."""
        os.environ |= around(environment)
        follow_leader()


class HostedRewards:
    """The reward functions of a recipe in a Ray worker."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        asked = Recipe.model_validate(recipe)
        settle(asked)
        self._rewards = find_source(asked, Given()).rewards

    def score(self, rollouts: list[Rollout]) -> Scores:
        """Return the rewards of completions."""
        return score(rollouts, self._rewards)
