"""`python -m bench.closed_loop --out DIR`: do the controllers hold the KL in real training?

    python -m bench.closed_loop --out runs/closed-loop

The arithmetic recipe, 300 steps, seeds 0 to 2. First without a KL term, the KL measured at every
step: half of its mean over the last 50 steps is the target. It must be a KL that the policy would
leave behind, or there would be nothing to hold. Then `log_pi` and `band`, from the recipe's
coefficient. The figure is the mean KL of the last half of the steps, divided by the target.

Runs are made one after the other in folders of DIR; what is whole already is not made again. The
table is printed, and drawn as DIR/closed-loop.svg.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from bench.closed_loop_picture import Curve, picture
from klinic.evidence.files import Journal
from klinic.loop.folder import METRICS

KLINIC = str(Path(sys.executable).with_name("klinic"))
RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.yaml"
SEEDS = (0, 1, 2)
STEPS, LAST = 300, 50
FREE, HELD = "none", ("log_pi", "band")
KL, COEF, RETENTION, ACCURACY = "kl_k1/mean", "kl_coef", "eval/retention", "eval/accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run: which controller, from which seed."""

    controller: str
    seed: int

    def folder(self, out: Path) -> Path:
        """Return where the run is."""
        return out / f"{self.controller}-seed{self.seed}"


def column(folder: Path, name: str) -> list[float]:
    """Return a metric of a run, in the order of its steps."""
    return [entry[name] for entry in Journal(folder / METRICS).entries() if name in entry]


def make(entry: Entry, out: Path, *settings: str) -> None:
    """Train, unless the run is there."""
    folder = entry.folder(out)
    if len(column(folder, KL)) == STEPS:
        return
    shared = [f"loop.max_steps={STEPS}", "loop.eval_every=100", "threads=1", f"seed={entry.seed}"]
    with (out / f"{folder.name}.log").open("w") as log:
        subprocess.run(  # noqa: S603
            [KLINIC, "train", str(RECIPE), *shared, *settings, f"output.dir={folder}"],
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def target_of(out: Path) -> float:
    """Return half the KL that nothing holds, over the last steps and all seeds."""
    free = [column(Entry(controller=FREE, seed=s).folder(out), KL)[-LAST:] for s in SEEDS]
    return fmean(map(fmean, free)) / 2


def rows(out: Path, target: float) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for every run."""
    for controller in (FREE, *HELD):
        for seed in SEEDS:
            folder = Entry(controller=controller, seed=seed).folder(out)
            kl, coef = column(folder, KL), column(folder, COEF)
            half = kl[STEPS // 2 :]
            yield (
                *(controller, str(seed), f"{fmean(half):.4f}", f"{fmean(half) / target:.2f}"),
                *(f"{coef[STEPS // 2 - 1]:.3g}", f"{coef[-1]:.3g}"),
                *(f"{column(folder, name)[-1]:.3f}" for name in (ACCURACY, RETENTION)),
            )


HEAD = (
    *("controller", "seed", "mean KL, last half", "over target", "coefficient, middle"),
    *("coefficient, end", "accuracy", "retention"),
)


def table(out: Path, target: float) -> str:
    """Return all runs as a Markdown table."""
    lines = [HEAD, ("---",) * len(HEAD), *rows(out, target)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def curves(out: Path) -> list[Curve]:
    """Return the KL of every run, to draw."""
    return [
        Curve(name=controller, values=column(Entry(controller=controller, seed=s).folder(out), KL))
        for controller in (FREE, "band", "log_pi")
        for s in SEEDS
    ]


def main(arguments: list[str]) -> None:
    """Make what is missing, print the table and draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.closed_loop")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        make(Entry(controller=FREE, seed=seed), out, "kl.coef=0", "kl.monitor_every=1")
    target = target_of(out)
    for controller in HELD:
        for seed in SEEDS:
            held = (f"kl.controller={controller}", f"kl.target={target}")
            make(Entry(controller=controller, seed=seed), out, *held)
    (out / "closed-loop.svg").write_text(picture(curves(out), target=target))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"target: {target:.4f} nats per token\n\n{table(out, target)}", markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
