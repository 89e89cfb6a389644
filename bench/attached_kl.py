"""TRL learns sums with klinic's KL term in the place of its own: held-out accuracy, seed by seed.

    python -m bench.attached_kl FOLDER [--seeds 3] [--steps 200]

The start, the rows and every setting are those of the race (`bench/race`).
"""

import argparse
import io
from pathlib import Path

from rich.console import Console

import klinic
from bench.trl_comparison import measure
from bench.trl_comparison.entry import START, Entry
from bench.trl_comparison.prompts import Watch, rows_by_step
from bench.trl_comparison.trainers import trl_trainer
from klinic.evidence.files import Journal
from klinic.tasks.arithmetic.task import TASK

NUM_SUMS = 800
COEF = 0.001


def learnt(folder: Path, *, seed: int, steps: int) -> dict[str, float]:
    """Train one seed and return its accuracy before and after."""
    by_step = rows_by_step(TASK.train_rows(measure.TRAINED), seed=seed, steps=steps)
    watch = Watch(by_step, TASK.rewards[TASK.default_reward])
    output = folder / f"seed{seed}"
    entry = Entry(trainer="trl", seed=seed, coef=0.0, steps=steps)
    trainer = trl_trainer(
        entry, watch, start=folder / START, by_step=by_step, output=output / "trl"
    )
    term = klinic.KL(coef=COEF, estimator="unbiased")
    klinic.attach(trainer, output / "run", kl=term, console=Console(file=io.StringIO()))
    trainer.train()
    trainer.save_model(str(output / "model"))
    before = measure.skills(folder / START, NUM_SUMS)[measure.TRAINED]
    after = measure.skills(output / "model", NUM_SUMS)[measure.TRAINED]
    return {"seed": seed, "steps": steps, "before": before, "after": after}


def main() -> None:
    """Make the start if need be, and train every seed that has no result yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    if not (given.folder / START).is_dir():
        given.folder.mkdir(parents=True, exist_ok=True)
        measure.make_start(given.folder)
    results = Journal(given.folder / "learnt.jsonl")
    done = {entry["seed"] for entry in results.entries()}
    for seed in range(1, given.seeds + 1):
        if seed not in done:
            results.append(learnt(given.folder, seed=seed, steps=given.steps))


if __name__ == "__main__":
    main()
