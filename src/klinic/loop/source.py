"""The training data of a recipe: rows, rewards, and held-out evaluation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klinic.loop.evaluate import (
    HeldOut,
    accuracy,
    answers,
    mean_of,
    mean_reward,
    measured,
    retention,
)
from klinic.loop.reading import Row
from klinic.loop.rows import from_python, read_rows
from klinic.model.loading import Policy
from klinic.recipe.function import find_function
from klinic.recipe.recipe import Recipe, check_complete
from klinic.rewards.entry import reward_of
from klinic.rewards.function import Reward, RewardFunction
from klinic.sampler.conversation import Reply
from klinic.tasks import catalogue
from klinic.tasks.base import Task, choose

FROM_PYTHON = "train_dataset"
"""The value of `data.path` for rows that were passed as Python objects."""

KEPT = "eval/retention_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Rows and reward functions passed from Python instead of named in the recipe."""

    reward_functions: Sequence[Callable[..., Any]] = ()
    rows: Iterable[Row] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Training rows, rewards, and held-out rows."""

    task: Task | None
    skill: str | None
    rows: Sequence[Row]
    rewards: Sequence[Reward]
    held_out: HeldOut | None
    kept: HeldOut | None
    """Rows of other abilities, which training should not degrade."""
    reply: Reply | None

    @property
    def every_reward(self) -> list[Reward]:
        """Rewards of training, evaluation and retention."""
        others = [part.rewards for part in (self.held_out, self.kept) if part is not None]
        return [*self.rewards, *(reward for rewards in others for reward in rewards)]

    def evaluate(
        self, policy: Policy, recipe: Recipe, before: Mapping[str, float] | None
    ) -> dict[str, float]:
        """Return the held-out metrics; empty if nothing is held out."""
        longest = recipe.sampling.max_new_tokens
        if self.task is not None and self.skill is not None:
            num = recipe.loop.eval_prompts
            given = answers(policy, self.task, num=num, max_new_tokens=longest)
            right = accuracy(self.task, given)
            metrics = {"eval/accuracy": right[self.skill]}
            metrics |= {f"eval/accuracy/{skill}": value for skill, value in right.items()}
            metrics |= measured(self.task, given[self.skill])
            metrics["eval/reward"] = mean_of(given[self.skill], self.rewards)
            start = right if before is None else _skills(before)
            kept = retention(right, start, self.skill)
            return metrics if kept is None else {**metrics, "eval/retention": kept}
        metrics = {
            name: mean_reward(
                policy,
                held_out,
                num=recipe.loop.eval_prompts,
                max_new_tokens=longest,
                reply=self.reply,
            )
            for name, held_out in (("eval/reward", self.held_out), (KEPT, self.kept))
            if held_out is not None
        }
        kept_at_first = (metrics if before is None else before).get(KEPT)
        if not kept_at_first:
            return metrics
        return {**metrics, "eval/retention": metrics[KEPT] / kept_at_first}


def find_source(recipe: Recipe, given: Given) -> Source:
    """Return the recipe's data and rewards, replaced by those passed from Python."""
    check_complete(recipe, has_reward_functions=bool(given.reward_functions))
    task = None if recipe.data.task is None else catalogue.find(recipe.data.task)
    skill = None
    if task is not None:
        names = {name: name for name in task.skills}
        skill = choose("skill", recipe.data.skill or task.default_skill, names)
    rewards = find_rewards(recipe, given, task)
    return Source(
        task=task,
        skill=skill,
        rows=_rows(recipe, given, task, skill),
        rewards=rewards,
        held_out=_held_out(recipe, rewards),
        kept=_kept(recipe),
        reply=_reply(recipe),
    )


def _rows(recipe: Recipe, given: Given, task: Task | None, skill: str | None) -> Sequence[Row]:
    if given.rows is not None:
        return from_python(given.rows, FROM_PYTHON)
    if task is not None and skill is not None:
        return task.train_rows(skill)
    assert recipe.data.path is not None  # noqa: S101 - a recipe has a task or a path
    return read_rows(recipe.data.path, map_with=recipe.data.map)


def _held_out(recipe: Recipe, rewards: Sequence[Reward]) -> HeldOut | None:
    if recipe.eval is None:
        return None
    own = [reward_of(entry, _no_name) for entry in recipe.eval.rewards]
    rows = read_rows(recipe.eval.path, map_with=recipe.data.map)
    return HeldOut(rows=rows, rewards=own or rewards)


def _kept(recipe: Recipe) -> HeldOut | None:
    if recipe.retention is None:
        return None
    return HeldOut(
        rows=read_rows(recipe.retention.path),
        rewards=[reward_of(entry, _no_name) for entry in recipe.retention.rewards],
    )


def _no_name(name: str) -> RewardFunction:
    """Unreachable: recipe validation refuses a task reward without a task."""
    raise AssertionError(name)


def _reply(recipe: Recipe) -> Reply | None:
    target = recipe.sampling.reply
    return None if target is None else find_function(target, example="my_tools.py:reply")


def find_rewards(recipe: Recipe, given: Given, task: Task | None) -> list[Reward]:
    """Return the training rewards: from Python, from the recipe, or the task's default."""
    rewards = [
        Reward(name=getattr(function, "__name__", type(function).__name__), function=function)
        for function in given.reward_functions
    ]
    known = {} if task is None else task.rewards
    rewards += [reward_of(e, lambda name: choose("reward", name, known)) for e in recipe.rewards]
    if not rewards and task is not None:
        name = task.default_reward
        rewards.append(Reward(name=name, function=task.rewards[name]))
    return rewards


def _skills(metrics: Mapping[str, float]) -> dict[str, float]:
    start = "eval/accuracy/"
    return {n.removeprefix(start): value for n, value in metrics.items() if n.startswith(start)}
