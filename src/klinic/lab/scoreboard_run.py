"""Trains a small run, healthy or with an injected fault, to evaluate the doctor."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from klinic.faults.base import Fault, Severity
from klinic.recipe.loading import from_keywords
from klinic.recipe.recipe import Recipe
from klinic.training.build import run_warm_start
from klinic.training.source import PythonInputs, load_task_data
from klinic.training.train import make_deterministic, train

STEPS = 6
TRIAL_SETTINGS: Mapping[str, Any] = {
    "model": "tiny",
    "task": "arithmetic",
    "threads": 1,
    # enough to emit digits and an end token; takes seconds on one core, and is cached
    "warm_start.steps": 150,
    "warm_start.batch_size": 32,
    "warm_start.learning_rate": 3e-3,
    "rewards": ["graduated"],  # rewards differ within groups from the first step
    "kl.coef": 0.05,
    "sampling.max_new_tokens": 8,
    "loop.max_steps": STEPS,
    "loop.prompts_per_step": 8,
    "loop.group_size": 8,
    "loop.eval_prompts": 8,
    "loop.checkpoint_every": 0,
    "learner.learning_rate": 3e-4,
    "learner.micro_batch_size": 64,
    "output.trackers": [],
    # off: faults are diagnosed here, not recovered from
    "recovery": None,
}


def train_trial(
    folder: Path,
    fault: Fault | None = None,
    *,
    severity: Severity = Severity.NORMAL,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Train for a few steps with the fault injected; return the run folder."""
    needed = {} if fault is None else fault.settings
    keywords = {**TRIAL_SETTINGS, **needed, **settings, "seed": seed, "output.dir": str(folder)}
    recipe = from_keywords(**keywords).recipe
    console = Console(quiet=True)
    cache_warm_start(recipe, console)
    with nullcontext() if fault is None else fault.inject(severity):
        train(recipe, name=folder.name, inputs=PythonInputs(), console=console)
    return folder


def cache_warm_start(recipe: Recipe, console: Console, *, folder: Path | None = None) -> None:
    """Run the warm start before the fault is injected: it is cached and shared with other runs.

    `folder` is the run folder, where `klinic watch` reads the progress.
    """
    if recipe.warm_start is not None:
        make_deterministic(recipe)
        run_warm_start(recipe, load_task_data(recipe, PythonInputs()), console, folder=folder)
