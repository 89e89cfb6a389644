"""How long a step takes when sampling runs ahead, against the longer of sampling and training.

    python -m bench.ahead FOLDER [SETTING=VALUE ...]

In turn, a run that samples and then trains, the same again, and one that does both at once. All
have a sampler in a process of its own, and one thread in each process. Settings make both halves
equally long.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from bench.arithmetic_runs import KLINIC, RECIPE, column

ROUNDS, FIRST, LAST = 3, 8, 28  # steps between which is measured: before, kernels warm up
WAYS = {"in turn": 0, "in turn, again": 0, "at once": 1}
SHARED = (
    *("threads=1", "cluster.samplers=1", "output.doctor=none", "loop.eval_every=0"),
    *("output.trackers=[]", f"loop.max_steps={LAST}", "loop.checkpoint_every=0"),
)


def seconds_per_step(folder: Path, settings: list[str]) -> float:
    """Return how long a step takes from one to the next, whatever there is between them."""
    with folder.with_suffix(".log").open("w") as log:
        run = subprocess.Popen(  # noqa: S603
            [KLINIC, "train", str(RECIPE), *SHARED, *settings, f"output.dir={folder}"],
            stdout=log,
            stderr=log,
        )
        at: dict[int, float] = {}
        while run.poll() is None:
            at.setdefault(len(column(folder, "loss")), time.perf_counter())
            time.sleep(0.01)
    if run.returncode:
        raise SystemExit(f"{folder} failed: see {folder.with_suffix('.log')}")
    return (at[LAST] - at[FIRST]) / (LAST - FIRST)


def main(folder: Path, settings: list[str]) -> None:
    """Measure; print every round, and the medians."""
    console = Console(highlight=False, soft_wrap=True)
    folder.mkdir(parents=True)
    against: list[float] = []
    itself: list[float] = []
    for number in range(ROUNDS):
        took, sampling = {}, 0.0
        for way, most in WAYS.items():
            run = folder / f"{way.replace(', ', '-').replace(' ', '-')}-{number}"
            took[way] = seconds_per_step(run, [*settings, f"cluster.max_staleness={most}"])
            if way == "in turn":
                sampling = statistics.mean(column(run, "time/sample")[FIRST:])
        training = took["in turn"] - sampling
        itself.append(took["in turn, again"] / took["in turn"])
        against.append(took["at once"] / max(sampling, training))
        console.print(
            f"sampling {sampling:.3f} s, training {training:.3f} s, both at once "
            f"{took['at once']:.3f} s: {against[-1]:.3f} of the longer; in turn against itself "
            f"{itself[-1]:.3f}"
        )
    console.print(f"median: {statistics.median(against):.3f} of the longer half")
    console.print(f"in turn against itself: {statistics.median(itself):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
