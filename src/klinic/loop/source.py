"""What a recipe trains on: rows, rewards, and how progress is measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klinic.loop.data import Row, checked, read_rows
from klinic.loop.evaluate import accuracy, mean_reward, retention
from klinic.model.loading import Policy
from klinic.recipe.recipe import Recipe, check_complete
from klinic.rewards.function import Reward, load_reward
from klinic.tasks import catalogue
from klinic.tasks.base import Task, choose

FROM_PYTHON = "train_dataset"
"""What `data.path` says where rows were handed over as objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What Python code hands over instead of naming it in the recipe."""

    reward_functions: Sequence[Callable[..., Any]] = ()
    rows: Iterable[Row] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows to train on, rewards, and rows held out."""

    task: Task | None
    skill: str | None
    rows: Sequence[Row]
    rewards: Sequence[Reward]
    eval_rows: Sequence[Row] | None

    def evaluate(
        self, policy: Policy, recipe: Recipe, before: Mapping[str, float] | None
    ) -> dict[str, float]:
        """Return the held-out metrics; empty where nothing is held out."""
        longest = recipe.sampling.max_new_tokens
        if self.task is not None and self.skill is not None:
            num = recipe.loop.eval_prompts
            right = accuracy(policy, self.task, num=num, max_new_tokens=longest)
            metrics = {"eval/accuracy": right[self.skill]}
            metrics |= {f"eval/accuracy/{skill}": value for skill, value in right.items()}
            start = right if before is None else _skills(before)
            kept = retention(right, start, self.skill)
            return metrics if kept is None else {**metrics, "eval/retention": kept}
        if self.eval_rows is None:
            return {}
        rows = self.eval_rows[: recipe.loop.eval_prompts]
        return {"eval/reward": mean_reward(policy, rows, self.rewards, max_new_tokens=longest)}


def find_source(recipe: Recipe, given: Given) -> Source:
    """Return what the recipe names, with what Python code handed over in its place."""
    check_complete(recipe, has_reward_functions=bool(given.reward_functions))
    task = None if recipe.data.task is None else catalogue.find(recipe.data.task)
    skill = None
    if task is not None:
        names = {name: name for name in task.skills}
        skill = choose("skill", recipe.data.skill or task.default_skill, names)
    return Source(
        task=task,
        skill=skill,
        rows=_rows(recipe, given, task, skill),
        rewards=_rewards(recipe, given, task),
        eval_rows=None
        if recipe.data.eval_path is None
        else read_rows(recipe.data.eval_path, split=recipe.data.split),
    )


def _rows(recipe: Recipe, given: Given, task: Task | None, skill: str | None) -> Sequence[Row]:
    if given.rows is not None:
        return checked(enumerate(given.rows, 1), "train_dataset")
    if task is not None and skill is not None:
        return task.train_rows(skill)
    assert recipe.data.path is not None  # noqa: S101 - the recipe has one of the two
    return read_rows(recipe.data.path, split=recipe.data.split)


def _rewards(recipe: Recipe, given: Given, task: Task | None) -> list[Reward]:
    rewards = [
        Reward(name=getattr(function, "__name__", type(function).__name__), function=function)
        for function in given.reward_functions
    ]
    for entry in recipe.rewards:
        if ":" in entry.function:
            rewards.append(load_reward(entry.function, weight=entry.weight))
        elif task is not None:
            function = choose("reward", entry.function, task.rewards)
            rewards.append(Reward(name=entry.function, function=function, weight=entry.weight))
    if not rewards and task is not None:
        name = task.default_reward
        rewards.append(Reward(name=name, function=task.rewards[name]))
    return rewards


def _skills(metrics: Mapping[str, float]) -> dict[str, float]:
    start = "eval/accuracy/"
    return {n.removeprefix(start): value for n, value in metrics.items() if n.startswith(start)}
