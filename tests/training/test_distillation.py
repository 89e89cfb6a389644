"""A student approaches its teacher: the shipped recipe, on three seeds."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from klinic.evidence.files import Journal
from klinic.lab.scoreboard_run import cache_warm_start
from klinic.recipe.loading import load_recipe
from klinic.training.build import run_warm_start
from klinic.training.source import PythonInputs, load_task_data
from klinic.training.train import make_deterministic, train

RECIPES = Path(__file__).parents[2] / "recipes"
SETTINGS = ("output.trackers=[]", "output.doctor=none", "loop.eval_every=0", "threads=1")
NUM_MEANS = 5  # steps whose mean exact KL is compared


def warm_started_teacher(folder):
    """Return the folder of the model that recipes/arithmetic.yaml starts from."""
    recipe = load_recipe(RECIPES / "arithmetic.yaml").recipe
    make_deterministic(recipe)
    data = load_task_data(recipe, PythonInputs())
    run_warm_start(recipe, data, Console(quiet=True)).copy_to(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("seed", [0, 1, 2], ids=lambda seed: f"seed{seed}")
def test_the_exact_kl_to_the_teacher_halves_and_accuracy_rises(seed, tmp_path):
    teacher, run = warm_started_teacher(tmp_path / "teacher"), tmp_path / "student"
    words = [f"teacher.path={teacher}", f"seed={seed}", f"output.dir={run}", *SETTINGS]
    recipe = load_recipe(RECIPES / "distil.yaml", words).recipe
    console = Console(quiet=True)
    cache_warm_start(recipe, console)
    result = train(recipe, name="student", inputs=PythonInputs(), console=console)
    lines = [e for e in Journal(run / "metrics.jsonl").entries() if "teacher/kl_exact" in e]
    measured = [line["teacher/kl_exact"] for line in lines]
    first, last = sum(measured[:NUM_MEANS]) / NUM_MEANS, sum(measured[-NUM_MEANS:]) / NUM_MEANS
    before, after = (part["eval/accuracy"] for part in (result.before, result.after))
    sys.stdout.write(
        f"seed {seed}: exact KL {first:.3f} to {last:.3f}, accuracy {before:.3f} to {after:.3f}; "
        f"every tenth step {[round(value, 3) for value in measured[::10]]}\n"
    )
    assert last <= first / 2
    assert after > before
