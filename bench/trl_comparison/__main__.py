"""`python -m bench.trl_comparison`: run what is left of a race, or print the table of one."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from bench.trl_comparison.entry import BEFORE, LOGS, Entry, entries, is_done, results
from bench.trl_comparison.table import page
from klinic.evidence.files import read_json

NUM_SUMS = 1999  # all sums that are held out


def main() -> int:
    """Return 0 when all runs are done."""
    given = _arguments()
    console = Console(highlight=False, soft_wrap=True)
    if given.table is not None:
        console.print(page(results(given.table)), markup=False)
        return 0
    folder = given.out.resolve()
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    _prepare(folder, given.num_sums, console)
    for entry in entries(seeds=given.seeds, coefs=given.coefs, steps=given.steps):
        if not is_done(entry, results(folder)):
            console.print(entry.name)
            _run(folder, entry.name, *_flags(entry))
    console.print(page(results(folder)), markup=False)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.trl_comparison", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to this one")
    parser.add_argument("--coefs", type=float, nargs="+", default=[0.0, 0.04])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--num-sums", type=int, default=NUM_SUMS, help="held-out sums to measure")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of the race, new or to go on with")
    where.add_argument("--table", type=Path, help="folder of a race whose results to print")
    return parser.parse_args()


def _prepare(folder: Path, num_sums: int, console: Console) -> None:
    if not (folder / BEFORE).is_file():
        console.print("The start: the warm start of recipes/arithmetic.yaml, or a folder `start`")
        _run(folder, "start", f"--num-sums={num_sums}")
    measured = read_json(folder / BEFORE)["num_sums"]
    if measured != num_sums:
        raise SystemExit(
            f"{folder} is a race measured on {measured} sums, and now {num_sums} are asked for: "
            f"their accuracies would not compare. Use --num-sums {measured}, or another --out."
        )


def _flags(entry: Entry) -> list[str]:
    return [
        f"--trainer={entry.trainer}",
        f"--seed={entry.seed}",
        f"--coef={entry.coef}",
        f"--steps={entry.steps}",
    ]


def _run(folder: Path, name: str, *flags: str) -> None:
    """Run one part in a process of its own, one thread, its output in a log."""
    log = folder / LOGS / f"{name}.txt"
    with log.open("wb") as file:
        done = subprocess.run(  # noqa: S603 - this Python, on a module of ours
            [sys.executable, "-m", "bench.trl_comparison.one", str(folder), *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{name} failed, with exit code {done.returncode}. See {log}.")


if __name__ == "__main__":
    sys.exit(main())
