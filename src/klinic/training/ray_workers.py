"""Factories of Ray workers, each built from the recipe and plain values."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klinic.cluster.learners import rendezvous_environment
from klinic.cluster.sampler_worker import HostedSampler
from klinic.evidence.rollout import Rollout
from klinic.model.loading import load_policy
from klinic.recipe.recipe import Recipe
from klinic.rewards.runner import score
from klinic.rewards.scores import StepRewards
from klinic.training.build import make_sampler
from klinic.training.learner_processes import run_learner_rank
from klinic.training.source import PythonInputs, load_task_data
from klinic.training.train import make_deterministic


def host_sampler(*, recipe: dict[str, Any], where: str, log: str) -> HostedSampler:
    """Return a sampler worker with its own copy of the start policy."""
    parsed_recipe = Recipe.model_validate(recipe)
    make_deterministic(parsed_recipe)
    # with an engine, this copy is only a buffer for weights; a worker sees its own GPU alone
    uses_engine = parsed_recipe.sampler.type == "vllm"
    device = "cpu" if uses_engine else parsed_recipe.model.device.partition(":")[0]
    section = parsed_recipe.model.model_copy(update={"name": where, "device": device})
    policy = load_policy(
        section, temperature=parsed_recipe.sampling.temperature, seed=parsed_recipe.seed
    )
    return HostedSampler(policy, make_sampler(parsed_recipe, policy, log=Path(log)))


class LearnerWorker:
    """A learner rank in a Ray worker."""

    def run_rank(self, environment: Mapping[str, str]) -> None:
        """Execute calls from rank 0 until it stops or dies."""
        os.environ |= rendezvous_environment(environment)
        run_learner_rank()


class RewardWorker:
    """The reward functions of a recipe in a Ray worker."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        parsed_recipe = Recipe.model_validate(recipe)
        make_deterministic(parsed_recipe)
        self._rewards = load_task_data(parsed_recipe, PythonInputs()).rewards

    def score(self, rollouts: list[Rollout]) -> StepRewards:
        """Return the rewards of completions."""
        return score(rollouts, self._rewards)
