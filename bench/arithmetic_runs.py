"""Runs of the arithmetic recipe in folders: made once, and read as columns of their metrics."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS

KLINIC = str(Path(sys.executable).with_name("klinic"))
RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.yaml"


def column(folder: Path, name: str) -> list[float]:
    """Return a metric of a run, in the order of its steps."""
    return [entry[name] for entry in Journal(folder / METRICS).entries() if name in entry]


def make(folder: Path, *settings: str, steps: int, seed: int) -> None:
    """Train on one thread, unless the run is there and whole; what it prints is beside it."""
    if len(column(folder, "loss")) == steps:
        return
    shared = [f"loop.max_steps={steps}", "threads=1", f"seed={seed}", f"output.dir={folder}"]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(  # noqa: S603
            [KLINIC, "train", str(RECIPE), *shared, *settings],
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
