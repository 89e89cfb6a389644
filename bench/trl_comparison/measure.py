"""The start, and the held-out accuracy of what was trained: one evaluator for both trainers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.trl_comparison.settings import LONGEST
from klinic.model.loading import Policy, load_policy
from klinic.model.reference import make_reference
from klinic.recipe.loading import load_recipe
from klinic.recipe.sections import ModelSection
from klinic.tasks.arithmetic.task import TASK
from klinic.training.build import start_policy
from klinic.training.evaluation import (
    complete_skills,
    complete_with,
    kl_to_reference,
    retained_fraction,
    skill_accuracies,
)
from klinic.training.source import PythonInputs, load_task_data
from klinic.training.train import make_deterministic

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
TRAINED = TASK.default_skill
NUM_OTHERS = 800  # questions of each skill that is not trained
NUM_PATHS = 800  # completions along which the KL is measured


def make_start(folder: Path) -> None:
    """Write the model that all runs start from: the warm start of the recipe."""
    recipe = load_recipe(RECIPE).recipe
    make_deterministic(recipe)
    start_policy(recipe, folder, load_task_data(recipe, PythonInputs()), Console())


def skills(model: Path, num_sums: int) -> dict[str, float]:
    """Return the share of right greedy answers by skill, on held-out questions."""
    policy = _policy(model)
    others = tuple(skill for skill in TASK.skills if skill != TRAINED)

    def right(names: tuple[str, ...], num: int) -> dict[str, float]:
        task = replace(TASK, skills=names)
        complete = complete_with(policy, max_new_tokens=LONGEST)
        return skill_accuracies(task, complete_skills(complete, task, num=num))

    return right((TRAINED,), num_sums) | right(others, min(NUM_OTHERS, num_sums))


def compare(model: Path, start: Path, before: dict[str, float], num_sums: int) -> dict[str, Any]:
    """Return what training did to the model."""
    after = skills(model, num_sums)
    far = kl_to_reference(
        _policy(model),
        make_reference(_policy(start).scorer, source=str(start)),
        TASK.eval_rows(TRAINED, min(NUM_PATHS, num_sums)),
        max_new_tokens=LONGEST,
    )
    return {
        "gain": after[TRAINED] - before[TRAINED],
        "retention": retained_fraction(after, before, TRAINED),
        "kl_per_token": far.per_token,
        "before": before,
        "after": after,
    }


def _policy(model: Path) -> Policy:
    return load_policy(ModelSection(name=str(model)), temperature=1.0, seed=0)
