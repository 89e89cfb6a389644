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
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from bench.arithmetic_runs import column, make, markdown
from bench.closed_loop_picture import Curve, picture

SEEDS = (0, 1, 2)
STEPS, LAST = 300, 50
EVALS = "loop.eval_every=100"
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
    return markdown(HEAD, list(rows(out, target)))


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
        free = Entry(controller=FREE, seed=seed).folder(out)
        make(free, "kl.coef=0", "kl.monitor_every=1", EVALS, steps=STEPS, seed=seed)
    target = target_of(out)
    for controller in HELD:
        for seed in SEEDS:
            held = Entry(controller=controller, seed=seed).folder(out)
            rule = (f"kl.controller={controller}", f"kl.target={target}")
            make(held, *rule, EVALS, steps=STEPS, seed=seed)
    (out / "closed-loop.svg").write_text(picture(curves(out), target=target))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"target: {target:.4f} nats per token\n\n{table(out, target)}", markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
