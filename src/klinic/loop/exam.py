"""The evaluation set of `klinic eval`, and one model's scores on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from klinic.loop.evaluate import HeldOut, accuracy, answers, mean_of, mean_reward
from klinic.loop.reading import Row
from klinic.loop.source import FROM_PYTHON, Given, Source, find_rewards, find_source
from klinic.model.loading import Policy
from klinic.recipe.recipe import Recipe
from klinic.rewards.function import Reward
from klinic.sampler.conversation import Reply
from klinic.tasks.base import Task

LONGEST = 256  # tokens of a completion, without a recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of one model; None where a score does not apply."""

    accuracy: dict[str, float]
    """By skill; empty without a task."""
    reward: float | None
    """Mean reward of greedy completions, by the recipe's rewards."""
    kept: float | None = None
    """Mean reward on the `retention` rows, by their own rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """The skills of a task, or the recipe's own rows, with the rewards that grade completions."""

    task: Task | None
    trained: str | None
    """The trained skill."""
    rewards: Sequence[Reward]
    """Rewards that the recipe names for its task."""
    own: Source | None
    num: int
    longest: int

    @property
    def asks(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.task is not None or self.own is not None

    @property
    def reply(self) -> Reply | None:
        """The reply function of a multi-turn rollout."""
        return None if self.own is None else self.own.reply

    @property
    def rows(self) -> Sequence[Row]:
        """Held-out rows of the training distribution, or the training rows if none are held out."""
        if self.own is not None:
            return _held_out(self.own).rows
        assert self.task is not None and self.trained is not None  # noqa: S101, PT018 - has_data
        return self.task.eval_rows(self.trained, self.num)

    def scores(self, policy: Policy) -> Scores:
        """Evaluate one model."""
        if self.task is not None and self.trained is not None:
            given = answers(policy, self.task, num=self.num, max_new_tokens=self.longest)
            return Scores(
                accuracy=accuracy(self.task, given),
                reward=mean_of(given[self.trained], self.rewards) if self.rewards else None,
            )
        if self.own is None:
            return Scores(accuracy={}, reward=None)
        held_out, kept = _held_out(self.own), self.own.kept
        return Scores(
            accuracy={},
            reward=self._reward(policy, held_out),
            kept=None if kept is None else self._reward(policy, kept),
        )

    def _reward(self, policy: Policy, by: HeldOut) -> float:
        return mean_reward(policy, by, num=self.num, max_new_tokens=self.longest, reply=self.reply)


def make_exam(recipe: Recipe | None, task: Task | None, num: int) -> Exam:
    """Return the evaluation of a task, or without one of the recipe's own rows."""
    skill = None if recipe is None else recipe.data.skill
    return Exam(
        task=task,
        trained=None if task is None else skill or task.default_skill,
        rewards=_named_rewards(recipe, task),
        own=None if task is not None else _own_data(recipe),
        num=num,
        longest=LONGEST if recipe is None else recipe.sampling.max_new_tokens,
    )


def _own_data(recipe: Recipe | None) -> Source | None:
    """Return the recipe's rows and rewards; None if they were passed in Python."""
    if recipe is None or recipe.data.path in {None, FROM_PYTHON} or not recipe.rewards:
        return None
    return find_source(recipe, Given())


def _named_rewards(recipe: Recipe | None, task: Task | None) -> Sequence[Reward]:
    """Return the rewards that the recipe names for this task."""
    if recipe is None or not recipe.rewards or task is None or recipe.data.task != task.name:
        return ()
    return find_rewards(recipe, Given(), task)


def _held_out(own: Source) -> HeldOut:
    """Return the held-out rows, or the training rows if there are none."""
    return own.held_out or HeldOut(rows=own.rows, rewards=own.rewards)
