"""One run in a process of its own: no trainer inherits what another left in torch."""

import argparse
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.trl_comparison import measure
from bench.trl_comparison.entry import BEFORE, RESULTS, START, Entry
from bench.trl_comparison.prompts import Watch, rows_by_step
from bench.trl_comparison.trainers import with_klinic, with_trl
from klinic.evidence.files import Journal, json_bytes, read_json
from klinic.evidence.writing import write_atomically
from klinic.tasks.arithmetic.task import TASK

PACKAGES = ("klinic", "trl", "transformers", "torch")


def prepare(folder: Path, num_sums: int) -> None:
    """Make the start, unless it is there, and measure it."""
    if not (folder / START).is_dir():
        measure.make_start(folder)
    right = measure.skills(folder / START, num_sums)
    what = {"num_sums": num_sums, "accuracy": right}
    write_atomically(folder / BEFORE, json_bytes(what))


def run(entry: Entry, folder: Path) -> dict[str, Any]:
    """Train, measure, and return the result."""
    before = read_json(folder / BEFORE)
    rows = TASK.train_rows(measure.TRAINED)
    by_step = rows_by_step(rows, seed=entry.seed, steps=entry.steps)
    watch = Watch(by_step, TASK.rewards[TASK.default_reward])
    start = folder / START
    with tempfile.TemporaryDirectory(dir=folder) as output:
        clock, cpu = time.perf_counter(), time.process_time()
        if entry.trainer == "klinic":
            model = with_klinic(entry, watch, start=start, rows=rows, output=Path(output))
        else:
            model = with_trl(entry, watch, start=start, by_step=by_step, output=Path(output))
        seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
        if len(watch.means) != entry.steps:
            raise AssertionError(f"{entry.name} made {len(watch.means)} steps.")
        found = measure.compare(model, start, before["accuracy"], before["num_sums"])
    return {
        **asdict(entry),
        **found,
        "prompts": watch.digest(),
        "num_sums": before["num_sums"],
        "rewards": watch.means,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "versions": {name: version(name) for name in PACKAGES},
    }


def main() -> None:
    """Make the start, or one run whose result is added to the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-sums", type=int)
    parser.add_argument("--trainer")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--coef", type=float)
    parser.add_argument("--steps", type=int)
    given = vars(parser.parse_args())
    folder, num_sums = given.pop("folder"), given.pop("num_sums")
    if num_sums is not None:
        prepare(folder, num_sums)
    else:
        Journal(folder / RESULTS).append(run(Entry(**given), folder))


if __name__ == "__main__":
    main()
