"""A small real run, sick or well: what the doctor is measured on."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from klinic.faults.base import Fault, Severity
from klinic.loop.assembly import warm_up
from klinic.loop.source import Given, find_source
from klinic.loop.train import settle, train
from klinic.recipe.loading import from_keywords
from klinic.recipe.recipe import Recipe

STEPS = 6
SETTINGS: Mapping[str, Any] = {
    "model": "tiny",
    "task": "arithmetic",
    "threads": 1,
    # enough to write digits and an end; seconds on one core, and made once
    "warm_start.steps": 150,
    "warm_start.batch_size": 32,
    "warm_start.learning_rate": 3e-3,
    "rewards": ["graduated"],  # so that completions differ from the first step on
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
    # a fault is to be diagnosed here, and not recovered from
    "recovery": None,
}


def make(
    folder: Path,
    fault: Fault | None = None,
    *,
    severity: Severity = Severity.NORMAL,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Train for a few steps, with the fault at work, and return the folder of the run."""
    needed = {} if fault is None else fault.settings
    how = {**SETTINGS, **needed, **settings, "seed": seed, "output.dir": str(folder)}
    recipe = from_keywords(**how).recipe
    console = Console(quiet=True)
    make_start(recipe, console)
    with nullcontext() if fault is None else fault.inject(severity):
        train(recipe, name=folder.name, given=Given(), console=console)
    return folder


def make_start(recipe: Recipe, console: Console) -> None:
    """Make what a run starts from while nothing is broken: it is kept, and others start there."""
    if recipe.warm_start is not None:
        settle(recipe)
        warm_up(recipe, find_source(recipe, Given()), console)
