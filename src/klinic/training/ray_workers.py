"""Factories of Ray workers, each built from the recipe and plain values."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klinic.cluster.learners import rendezvous_environment
from klinic.cluster.sampler_worker import HostedSampler
from klinic.evidence.rollout import Rollout
from klinic.model.loading import load_policy
from klinic.model.outline import load_outline
from klinic.recipe.recipe import Recipe
from klinic.rewards.runner import score
from klinic.rewards.scores import StepRewards
from klinic.sampler.transformers import TransformersSampler
from klinic.training.build import sampler_settings
from klinic.training.build_engine import make_engine
from klinic.training.learner_processes import run_learner_rank
from klinic.training.source import PythonInputs, load_task_data
from klinic.training.train import make_deterministic


def host_sampler(*, recipe: dict[str, Any], where: str, log: str) -> HostedSampler:
    """Return a sampler worker: an engine, or a sampler with a policy of its own."""
    parsed_recipe = Recipe.model_validate(recipe)
    make_deterministic(parsed_recipe)
    section = parsed_recipe.model.model_copy(update={"name": where})
    temperature, seed = parsed_recipe.sampling.temperature, parsed_recipe.seed
    settings = sampler_settings(parsed_recipe)
    if parsed_recipe.sampler.type == "vllm":
        from klinic.sampler.vllm.engine_sampler import EngineSampler

        outline = load_outline(section, temperature=temperature, seed=seed)
        engine = make_engine(parsed_recipe, outline, Path(log))
        return HostedSampler(outline, EngineSampler(outline, engine, **settings))
    # a worker sees its own GPU alone
    device = section.device.partition(":")[0]
    section = section.model_copy(update={"device": device})
    policy = load_policy(section, temperature=temperature, seed=seed)
    return HostedSampler(policy, TransformersSampler(policy, **settings))


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
