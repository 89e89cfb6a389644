"""Runs the demo: `klinic train` on the demo recipe, with an optional injected fault."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS, RUN_FACTS
from klinic.faults import FAULTS, Fault, Severity
from klinic.lab.demo.view import DemoView
from klinic.lab.scoreboard_run import TRIAL_SETTINGS, cache_warm_start
from klinic.recipe.loading import load_recipe
from klinic.recipe.recipe import Recipe
from klinic.training.result import Result
from klinic.training.run_folder import lock_holder_pid, open_folder
from klinic.training.source import PythonInputs
from klinic.training.train import train

FAULT_SETTINGS = {
    **TRIAL_SETTINGS,
    "loop.max_steps": 10,
    "loop.eval_every": 10,
    "loop.eval_prompts": 50,
    "learner.schedule": "constant",
}
"""Settings of a run with a fault, as in the scoreboard: a short warm start leaves more entropy, so
that faults show clearly, and takes seconds. Recovery is off, so that faults are diagnosed."""
NUM_AVERAGED = 10  # steps averaged


def find_fault(name: str) -> Fault:
    """Return the fault that produces a cause."""
    return next(fault for fault in FAULTS if fault.cause == name)


def demo_recipe(fault: Fault | None, out: Path | None, overrides: Sequence[str]) -> Recipe:
    """Load the demo recipe with the settings of the fault and the user's overrides."""
    needed = {} if fault is None else {**FAULT_SETTINGS, **fault.settings}
    where = [] if out is None else [f"output.dir={json.dumps(str(out))}"]
    with as_file(files("klinic.lab.demo") / "recipe.yaml") as path:
        return load_recipe(path, [*overrides, *where], changed=needed).recipe


def train_demo(recipe: Recipe, fault: Fault | None, console: Console) -> Result:
    """Train with the fault injected after the warm start, which is cached for other runs."""
    name = "demo" if fault is None else f"demo-{fault.cause}"
    folder = open_folder(recipe, name, resume=False)  # runs/demo, or the first free number
    output = recipe.output.model_copy(update={"dir": str(folder)})
    recipe = recipe.model_copy(update={"output": output})
    view = DemoView(console, max_steps=recipe.loop.max_steps)
    with _remove_unstarted(folder):
        cache_warm_start(recipe, console, folder=folder)
        with nullcontext() if fault is None else fault.inject(Severity.NORMAL):
            return train(recipe, name=name, inputs=PythonInputs(), console=console, view=view)


@contextmanager
def _remove_unstarted(folder: Path) -> Iterator[None]:
    """Remove the folder of a run that failed to start, unless another process holds it."""
    try:
        yield
    except BaseException:
        if not (folder / RUN_FACTS).exists() and lock_holder_pid(folder) in {"", str(os.getpid())}:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def last_kl(folder: Path) -> float | None:
    """Return the mean KL per token to the reference over the last steps; None if not measured."""
    kl_values = [entry["kl"] for entry in Journal(folder / METRICS).entries() if entry.get("kl")]
    last = kl_values[-NUM_AVERAGED:]
    return sum(last) / len(last) if last else None
