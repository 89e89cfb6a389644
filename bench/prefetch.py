"""How long a step takes when sampling runs ahead, against the longer of sampling and training.

    python -m bench.prefetch FOLDER [SETTING=VALUE ...]

In turn, a run that samples and then trains, the same again, and runs that do both at once, one and
two updates behind. All have a sampler in a process of its own, and one thread in each process.
Settings make both halves equally long.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from bench.arithmetic_runs import KLINIC, RECIPE, column

ROUNDS, FIRST, LAST = 3, 8, 28  # steps between which is measured: before, kernels warm up
WAYS = {"in turn": 0, "in turn, again": 0, "one ahead": 1, "two ahead": 2}
LOOK_EVERY = 0.02  # seconds; who looks costs little, or it would take from what both cores do
SHARED = (
    *("threads=1", "cluster.samplers=1", "output.doctor=none", "loop.eval_every=0"),
    *("output.trackers=[]", f"loop.max_steps={LAST}", "loop.checkpoint_every=0"),
)


def seconds_per_step(folder: Path, settings: list[str]) -> float:
    """Return how long a step takes from one to the next, whatever there is between them.

    The median over steps: other guests of the machine take a core away for seconds at a time.
    """
    with folder.with_suffix(".log").open("w") as log:
        run = subprocess.Popen(  # noqa: S603
            [KLINIC, "train", str(RECIPE), *SHARED, *settings, f"output.dir={folder}"],
            stdout=log,
            stderr=log,
        )
        at: dict[int, float] = {}
        while run.poll() is None:
            at.setdefault(_num_steps(folder), time.perf_counter())
            time.sleep(LOOK_EVERY)
    if run.returncode:
        raise SystemExit(f"{folder} failed: see {folder.with_suffix('.log')}")
    return statistics.median(at[n + 1] - at[n] for n in range(FIRST, LAST) if {n, n + 1} <= set(at))


def _num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def main(folder: Path, settings: list[str]) -> None:
    """Measure; print every round, and the medians."""
    console = Console(highlight=False, soft_wrap=True)
    folder.mkdir(parents=True)
    against: dict[str, list[float]] = {way: [] for way, most in WAYS.items() if most}
    itself: list[float] = []
    for number in range(ROUNDS):
        took, sampling = {}, 0.0
        for way, most in WAYS.items():
            run = folder / f"{way.replace(', ', '-').replace(' ', '-')}-{number}"
            took[way] = seconds_per_step(run, [*settings, f"cluster.max_staleness={most}"])
            if way == "in turn":
                sampling = statistics.median(column(run, "time/sample")[FIRST:])
        training = took["in turn"] - sampling
        itself.append(took["in turn, again"] / took["in turn"])
        for way, ratios in against.items():
            ratios.append(took[way] / max(sampling, training))
        told = ", ".join(f"{w} {took[w]:.3f} s ({r[-1]:.3f})" for w, r in against.items())
        console.print(
            f"sampling {sampling:.3f} s, training {training:.3f} s; {told}; in turn against "
            f"itself {itself[-1]:.3f}"
        )
    for way, ratios in against.items():
        console.print(f"{way}: {statistics.median(ratios):.3f} of the longer half")
    console.print(f"in turn against itself: {statistics.median(itself):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
