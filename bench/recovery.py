"""`python -m bench.recovery --out DIR`: does recovery save a run whose learning rate is too high?

    python -m bench.recovery --out runs/recovery

The arithmetic recipe, 250 steps, seeds 0 to 2: at the right learning rate (1e-4, the recipe's), at
one that ruins the policy within ten steps (6e-4) without recovery, and at the same one with
recovery. The gain is that of held-out accuracy; it must be at least half of what the right rate
gives. What was done, and when, is in the last column.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from bench.arithmetic_runs import column, make, markdown
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS

SEEDS, STEPS = (0, 1, 2), 250
TOO_HIGH = "learner.learning_rate=6e-4"
LIMITS = ("recovery.kl_limit=0.5", "recovery.reward_drop=0.25", "loop.checkpoint_every=10")
SETTINGS = {
    "right rate": (),
    "too high, off": (TOO_HIGH, "recovery=null"),
    "too high, on": (TOO_HIGH, *LIMITS),
}


def folder_of(out: Path, kind: str, seed: int) -> Path:
    """Return where a run is."""
    return out / f"{kind.replace(', ', '-').replace(' ', '-')}-seed{seed}"


def actions(folder: Path) -> str:
    """Return what was done about trouble, in a few words."""
    told = [
        f"{event['step']}: {event['kind']}, {event['act']}"
        for event in Journal(folder / EVENTS).entries()
        if event["event"] == "trouble" and event["act"] != "again"
    ]
    return "; ".join(told)


def rows(out: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for every run."""
    for kind in SETTINGS:
        for seed in SEEDS:
            folder = folder_of(out, kind, seed)
            accuracy = column(folder, "eval/accuracy")
            retention = column(folder, "eval/retention")
            yield (
                *(kind, str(seed), str(len(column(folder, "loss")))),
                *(f"{accuracy[0]:.3f}", f"{accuracy[-1]:.3f}"),
                *(f"{accuracy[-1] - accuracy[0]:+.3f}", f"{retention[-1]:.3f}", actions(folder)),
            )


HEAD = (
    "run",
    "seed",
    "steps",
    "before",
    "after",
    "gain",
    "retention",
    "what was done, step by step",
)


def main(arguments: list[str]) -> None:
    """Make what is missing and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for kind, settings in SETTINGS.items():
        for seed in SEEDS:
            make(folder_of(out, kind, seed), *settings, steps=STEPS, seed=seed)
    Console(highlight=False, soft_wrap=True).print(markdown(HEAD, list(rows(out))), markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
