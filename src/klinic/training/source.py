"""The training data of a recipe: rows, rewards, and held-out evaluation."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from klinic.data.dataset import Row, read_rows, rows_from_python
from klinic.recipe.function import find_function
from klinic.recipe.recipe import Recipe, check_complete
from klinic.rewards.entry import build_reward
from klinic.rewards.function import Reward, RewardFunction, reward_name
from klinic.sampler.multi_turn import EnvironmentReply
from klinic.tasks import catalogue
from klinic.tasks.base import Task, look_up
from klinic.training.callbacks import CallbackRunner
from klinic.training.evaluation import (
    CompleteRows,
    HeldOutSet,
    complete_skills,
    mean_reward,
    mean_total_reward,
    retained_fraction,
    skill_accuracies,
    task_measures,
)

FROM_PYTHON = "train_dataset"
"""The value of `data.path` for rows that were passed as Python objects."""

HELD_OUT_FROM_PYTHON = "eval_dataset"
"""The value of `eval.path` for held-out rows that were passed as Python objects."""

RETENTION_REWARD = "eval/retention_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonInputs:
    """Objects that are passed from Python instead of named in the recipe."""

    reward_functions: Sequence[Callable[..., Any]] = ()
    reward_weights: Sequence[float] = ()
    """One factor per reward function; empty: 1 for each."""
    rows: Iterable[Row] | None = None
    held_out_rows: Iterable[Row] | None = None
    model: Any = None
    """A model in memory, from which the run starts."""
    tokenizer: Any = None
    """The tokenizer, if it is not that of the model's folder."""
    callbacks: CallbackRunner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """Training rows, rewards, and held-out rows."""

    task: Task | None
    skill: str | None
    rows: Sequence[Row]
    rewards: Sequence[Reward]
    held_out: HeldOutSet | None
    retention_set: HeldOutSet | None
    """Rows of other abilities, which training should not degrade."""
    reply: EnvironmentReply | None
    inputs: PythonInputs = field(default_factory=PythonInputs)

    @property
    def all_rewards(self) -> list[Reward]:
        """Rewards of training, evaluation and retention."""
        held_out_rewards = [
            split.rewards for split in (self.held_out, self.retention_set) if split is not None
        ]
        return [*self.rewards, *(reward for rewards in held_out_rewards for reward in rewards)]

    @property
    def has_held_out_rows(self) -> bool:
        """Whether there is anything to evaluate on."""
        return any(rows is not None for rows in (self.task, self.held_out, self.retention_set))

    def evaluate(
        self, complete: CompleteRows, recipe: Recipe, before: Mapping[str, float] | None
    ) -> dict[str, float]:
        """Return the held-out metrics; empty if nothing is held out."""
        num = recipe.loop.eval_prompts
        if self.task is not None and self.skill is not None:
            completions = complete_skills(complete, self.task, num=num)
            accuracies = skill_accuracies(self.task, completions)
            metrics = {"eval/accuracy": accuracies[self.skill]}
            metrics |= {f"eval/accuracy/{skill}": value for skill, value in accuracies.items()}
            metrics |= task_measures(self.task, completions[self.skill])
            metrics["eval/reward"] = mean_total_reward(completions[self.skill], self.rewards)
            start = accuracies if before is None else _skill_accuracies(before)
            retained = retained_fraction(accuracies, start, self.skill)
            return metrics if retained is None else {**metrics, "eval/retention": retained}
        metrics = {
            name: mean_reward(complete, held_out, num=num)
            for name, held_out in (
                ("eval/reward", self.held_out),
                (RETENTION_REWARD, self.retention_set),
            )
            if held_out is not None
        }
        initial_retention_reward = (metrics if before is None else before).get(RETENTION_REWARD)
        if not initial_retention_reward:
            return metrics
        return {**metrics, "eval/retention": metrics[RETENTION_REWARD] / initial_retention_reward}


def load_task_data(recipe: Recipe, inputs: PythonInputs) -> TaskData:
    """Return the recipe's data and rewards, replaced by those passed from Python."""
    check_complete(recipe, has_reward_functions=bool(inputs.reward_functions))
    task, skill = _find_task(recipe)
    rewards = find_rewards(recipe, inputs, task)
    return TaskData(
        task=task,
        skill=skill,
        rows=_training_rows(recipe, inputs, task, skill),
        rewards=rewards,
        held_out=_held_out_set(recipe, inputs, rewards),
        retention_set=_retention_set(recipe),
        reply=_reply_function(recipe),
        inputs=inputs,
    )


def count_rows(recipe: Recipe, rows: Iterable[Row] | None) -> int:
    """Return the number of training rows, of the recipe or passed from Python."""
    if rows is not None and isinstance(rows, Sized):
        return len(rows)
    return len(_training_rows(recipe, PythonInputs(rows=rows), *_find_task(recipe)))


def _find_task(recipe: Recipe) -> tuple[Task | None, str | None]:
    """Return the task of a recipe and the skill to train; None for a dataset."""
    if recipe.data.task is None:
        return None, None
    task = catalogue.find_task(recipe.data.task)
    names = {name: name for name in task.skills}
    return task, look_up("skill", recipe.data.skill or task.default_skill, names)


def _training_rows(
    recipe: Recipe, inputs: PythonInputs, task: Task | None, skill: str | None
) -> Sequence[Row]:
    if inputs.rows is not None:
        return rows_from_python(inputs.rows, FROM_PYTHON)
    if task is not None and skill is not None:
        return task.train_rows(skill)
    assert recipe.data.path is not None  # noqa: S101 - a recipe has a task or a path
    return read_rows(recipe.data.path, map_with=recipe.data.map)


def _held_out_set(
    recipe: Recipe, inputs: PythonInputs, rewards: Sequence[Reward]
) -> HeldOutSet | None:
    if recipe.eval is None:
        return None
    eval_rewards = [build_reward(entry, _refuse_reward_name) for entry in recipe.eval.rewards]
    if inputs.held_out_rows is not None:
        rows = rows_from_python(inputs.held_out_rows, HELD_OUT_FROM_PYTHON)
    else:
        rows = read_rows(recipe.eval.path, map_with=recipe.data.map)
    return HeldOutSet(rows=rows, rewards=eval_rewards or rewards)


def _retention_set(recipe: Recipe) -> HeldOutSet | None:
    if recipe.retention is None:
        return None
    return HeldOutSet(
        rows=read_rows(recipe.retention.path),
        rewards=[build_reward(entry, _refuse_reward_name) for entry in recipe.retention.rewards],
    )


def _refuse_reward_name(name: str) -> RewardFunction:
    """Unreachable: recipe validation refuses a task reward without a task."""
    raise AssertionError(name)


def _reply_function(recipe: Recipe) -> EnvironmentReply | None:
    target = recipe.sampling.reply
    return None if target is None else find_function(target, example="my_tools.py:reply")


def find_rewards(recipe: Recipe, inputs: PythonInputs, task: Task | None) -> list[Reward]:
    """Return the training rewards: from Python, from the recipe, or the task's default."""
    weights = inputs.reward_weights or [1.0] * len(inputs.reward_functions)
    rewards = [
        Reward(name=reward_name(function), function=function, weight=weight)
        for function, weight in zip(inputs.reward_functions, weights, strict=True)
    ]
    task_rewards = {} if task is None else task.rewards
    rewards += [
        build_reward(e, lambda name: look_up("reward", name, task_rewards)) for e in recipe.rewards
    ]
    if not rewards and task is not None:
        name = task.default_reward
        rewards.append(Reward(name=name, function=task.rewards[name]))
    return rewards


def _skill_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    start = "eval/accuracy/"
    return {n.removeprefix(start): value for n, value in metrics.items() if n.startswith(start)}
