"""What training did to held-out rows, by every measure of the task: greedy, and as in training.

    python -m bench.held_out RUN ...

Runs are of one recipe and of different seeds; the start is that of the first.
"""

import sys
from pathlib import Path

from rich.console import Console

from bench.arithmetic_runs import markdown
from klinic.model.loading import Policy, load_policy
from klinic.recipe.recipe import Recipe
from klinic.recipe.sections import ModelSection
from klinic.sampler.token_sampling import SamplingParams
from klinic.tasks import catalogue
from klinic.training.compare import find_subject
from klinic.training.evaluation import complete_with, task_measures
from klinic.training.train import make_deterministic

NUM = 400  # held-out rows


def measures(model: str, recipe: Recipe, temperature: float) -> dict[str, float]:
    """Return the means of what the task measures over held-out rows."""
    assert recipe.data.task is not None  # noqa: S101 - tasks alone have measures
    task = catalogue.find_task(recipe.data.task)
    rows = task.eval_rows(recipe.data.skill or task.default_skill, NUM)
    complete = complete_with(
        _policy(model),
        max_new_tokens=recipe.sampling.max_new_tokens,
        sampling_params=SamplingParams(temperature=temperature),
    )
    rollouts = complete(rows)
    found = task_measures(task, rollouts)
    weights = {entry.function: entry.weight for entry in recipe.rewards}
    parts = {name.rpartition("/")[2]: value for name, value in found.items()}
    total = sum(weights.get(name, 0.0) * value for name, value in parts.items())
    return {"reward": total, **parts}


def _policy(model: str) -> Policy:
    return load_policy(ModelSection(name=model), temperature=1.0, seed=0)


def main(runs: list[Path]) -> None:
    """Measure the start and every run; print a table for each way of drawing."""
    console = Console(highlight=False, soft_wrap=True)
    first = find_subject(str(runs[0]))
    recipe = first.recipe
    assert recipe is not None  # noqa: S101 - they are runs
    make_deterministic(recipe)
    for label, temperature in (("greedy", 0.0), ("as in training", recipe.sampling.temperature)):
        table = {"start": measures(str(runs[0] / "start"), recipe, temperature)}
        for run in runs:
            table[str(run)] = measures(find_subject(str(run)).model, recipe, temperature)
        names = list(table["start"])
        cells = [[name, *(f"{row[n]:.3f}" for n in names)] for name, row in table.items()]
        console.print(f"{label} ({NUM} held-out rows)\n\n{markdown(['', *names], cells)}\n")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
