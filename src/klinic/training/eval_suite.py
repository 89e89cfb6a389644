"""The evaluation set of `klinic eval`, and one model's scores on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from klinic.data.dataset import Row
from klinic.model.loading import Policy
from klinic.recipe.recipe import Recipe
from klinic.rewards.function import Reward
from klinic.sampler.multi_turn import EnvironmentReply
from klinic.tasks.base import Task
from klinic.training.evaluation import (
    HeldOutSet,
    complete_skills,
    complete_with,
    mean_reward,
    mean_total_reward,
    skill_accuracies,
)
from klinic.training.source import FROM_PYTHON, PythonInputs, TaskData, find_rewards, load_task_data

DEFAULT_MAX_NEW_TOKENS = 256  # tokens of a completion, without a recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScores:
    """The scores of one model; None where a score does not apply."""

    accuracy: dict[str, float]
    """By skill; empty without a task."""
    reward: float | None
    """Mean reward of greedy completions, by the recipe's rewards."""
    retention_reward: float | None = None
    """Mean reward on the `retention` rows, by their own rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSuite:
    """The skills of a task, or the recipe's own rows, with the rewards that grade completions."""

    task: Task | None
    trained_skill: str | None
    """The trained skill."""
    rewards: Sequence[Reward]
    """Rewards that the recipe names for its task."""
    own_data: TaskData | None
    num: int
    max_new_tokens: int

    @property
    def has_data(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.task is not None or self.own_data is not None

    @property
    def reply(self) -> EnvironmentReply | None:
        """The reply function of a multi-turn rollout."""
        return None if self.own_data is None else self.own_data.reply

    @property
    def eval_rows(self) -> Sequence[Row]:
        """Held-out rows of the training distribution, or the training rows if none are held out."""
        if self.own_data is not None:
            return _held_out_or_training(self.own_data).rows
        assert self.task is not None and self.trained_skill is not None  # noqa: S101, PT018 - has_data
        return self.task.eval_rows(self.trained_skill, self.num)

    def score_policy(self, policy: Policy) -> EvalScores:
        """Evaluate one model."""
        complete = complete_with(policy, max_new_tokens=self.max_new_tokens, reply=self.reply)
        if self.task is not None and self.trained_skill is not None:
            completions = complete_skills(complete, self.task, num=self.num)
            return EvalScores(
                accuracy=skill_accuracies(self.task, completions),
                reward=mean_total_reward(completions[self.trained_skill], self.rewards)
                if self.rewards
                else None,
            )
        if self.own_data is None:
            return EvalScores(accuracy={}, reward=None)
        held_out, retention_set = _held_out_or_training(self.own_data), self.own_data.retention_set
        return EvalScores(
            accuracy={},
            reward=mean_reward(complete, held_out, num=self.num),
            retention_reward=None
            if retention_set is None
            else mean_reward(complete, retention_set, num=self.num),
        )


def make_eval_suite(recipe: Recipe | None, task: Task | None, num: int) -> EvalSuite:
    """Return the evaluation of a task, or without one of the recipe's own rows."""
    skill = None if recipe is None else recipe.data.skill
    return EvalSuite(
        task=task,
        trained_skill=None if task is None else skill or task.default_skill,
        rewards=_named_rewards(recipe, task),
        own_data=None if task is not None else _load_own_data(recipe),
        num=num,
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS if recipe is None else recipe.sampling.max_new_tokens,
    )


def _load_own_data(recipe: Recipe | None) -> TaskData | None:
    """Return the recipe's rows and rewards; None if they were passed in Python."""
    if recipe is None or recipe.data.path in {None, FROM_PYTHON} or not recipe.rewards:
        return None
    return load_task_data(recipe, PythonInputs())


def _named_rewards(recipe: Recipe | None, task: Task | None) -> Sequence[Reward]:
    """Return the rewards that the recipe names for this task."""
    if recipe is None or not recipe.rewards or task is None or recipe.data.task != task.name:
        return ()
    return find_rewards(recipe, PythonInputs(), task)


def _held_out_or_training(own_data: TaskData) -> HeldOutSet:
    """Return the held-out rows, or the training rows if there are none."""
    return own_data.held_out or HeldOutSet(rows=own_data.rows, rewards=own_data.rewards)
