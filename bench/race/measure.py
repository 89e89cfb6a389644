"""The start, and the held-out accuracy of what was trained: one evaluator for both trainers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.race.settings import LONGEST
from klinic.loop.assembly import start_policy
from klinic.loop.evaluate import accuracy, answers, distance, retention
from klinic.loop.source import Given, find_source
from klinic.loop.train import settle
from klinic.model.loading import Policy, load_policy
from klinic.model.reference import frozen
from klinic.recipe.loading import load
from klinic.recipe.model import ModelSection
from klinic.tasks.arithmetic.task import TASK

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
TRAINED = TASK.default_skill
NUM_OTHERS = 800  # questions of each skill that is not trained
NUM_PATHS = 800  # completions along which the KL is measured


def make_start(folder: Path) -> None:
    """Write the model that all runs start from: the warm start of the recipe."""
    recipe = load(RECIPE).recipe
    settle(recipe)
    start_policy(recipe, folder, find_source(recipe, Given()), Console())


def skills(model: Path, num_sums: int) -> dict[str, float]:
    """Return the share of right greedy answers by skill, on held-out questions."""
    policy = _policy(model)
    others = tuple(skill for skill in TASK.skills if skill != TRAINED)

    def right(names: tuple[str, ...], num: int) -> dict[str, float]:
        task = replace(TASK, skills=names)
        return accuracy(task, answers(policy, task, num=num, max_new_tokens=LONGEST))

    return right((TRAINED,), num_sums) | right(others, min(NUM_OTHERS, num_sums))


def compare(model: Path, start: Path, before: dict[str, float], num_sums: int) -> dict[str, Any]:
    """Return what training did to the model."""
    after = skills(model, num_sums)
    far = distance(
        _policy(model),
        frozen(_policy(start).scorer, source=str(start)),
        TASK.eval_rows(TRAINED, min(NUM_PATHS, num_sums)),
        max_new_tokens=LONGEST,
    )
    return {
        "gain": after[TRAINED] - before[TRAINED],
        "retention": retention(after, before, TRAINED),
        "kl_per_token": far.per_token,
        "before": before,
        "after": after,
    }


def _policy(model: Path) -> Policy:
    return load_policy(ModelSection(name=str(model)), temperature=1.0, seed=0)
