"""What `klinic.attach` costs a TRL run in two processes (DDP over gloo), beside an A/A control.

    ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone \
        --nproc_per_node 2 -m bench.attach_ranks FOLDER [--rounds 12] [--processor-time]

Every rank makes the same rounds, since a step is a collective. Rank 0 prints the ratios and writes
FOLDER/attach-ranks.json; the time that a rank waits in klinic for the other counts as klinic's.
With `--processor-time`, for a machine that has other work, only the step's inside is measured, in
seconds of the processor: with klinic, and as its control without, where what other threads do is
gloo's. Waits do not count.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bench.harness import Claim, measure, versions
from bench.in_step_timing import STEPS, share
from bench.models import SIZES, saved_model
from bench.step import PROMPTS, TOKENS, Bench, _get_past, timed_hooks
from bench.steps import Sizes, Trl

MUST = 1.015


def compare(bench: Bench, size: str, rounds: int) -> dict[str, Any]:
    """Compare TRL's step with klinic attached and without, interleaved, beside TRL again."""
    arms = {
        "trl": Trl(bench.model, bench.sizes, 0.0, bench.folder / "trl"),
        "attached": Trl(bench.model, bench.sizes, 0.0, bench.folder / "attached", attached={}),
    }
    _get_past(*arms.values())
    name = f"attach {size}, 2 processes: TRL with klinic / without"
    claims = [Claim(name=name, arm="attached", over="trl", must=MUST)]
    # as many rounds in every rank, whatever each has measured
    measured = measure(arms, claims, least=rounds, most=rounds, seconds=float("inf"))
    return {"ratios": measured.pop("ratios"), "raw": {"interleaved": measured}}


def time_inside(
    bench: Bench, name: str, attached: dict[str, Any] | None, given: argparse.Namespace
) -> dict[str, Any]:
    """Return the fraction that klinic, or without it what is no step, adds to a step."""
    with timed_hooks(has_processor_time=given.processor_time) as clock:
        timed = Trl(bench.model, bench.sizes, 0.0, bench.folder / name, attached=attached)
        _get_past(timed)
        must = None if attached is None else MUST
        within, raw = share(timed, clock, timed.thread, must=must, rounds=given.steps)
    return {"ratios": {name: within}, "raw": {name: raw}}


def measure_ranks(bench: Bench, size: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of this rank, and the seconds that they are made from."""
    if given.processor_time:
        parts = [
            time_inside(bench, "control", None, given),
            time_inside(bench, "timed inside", {}, given),
        ]
    else:
        parts = [time_inside(bench, "timed inside", {}, given), compare(bench, size, given.rounds)]
    return {
        what: {name: value for part in parts for name, value in part[what].items()}
        for what in ("ratios", "raw")
    }


def main() -> None:
    """Measure, and write what rank 0 has seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=STEPS, help="of those timed inside")
    parser.add_argument("--processor-time", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rank, load = int(os.environ["RANK"]), os.getloadavg()[0]
    bench = Bench(
        model=saved_model(given.size, given.folder / f"model-{rank}"),
        sizes=Sizes(
            vocabulary=SIZES[given.size]["vocab_size"],
            prompts=PROMPTS[given.size],
            completion_length=TOKENS[given.size],
        ),
        folder=given.folder,
    )
    measured = measure_ranks(bench, given.size, given)
    if rank == 0:
        facts = {"versions": versions(), "load": load} | measured
        (given.folder / "attach-ranks.json").write_text(json.dumps(facts, indent=1))
        sys.stdout.write(json.dumps(measured["ratios"], indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the trainers wait for a next step


if __name__ == "__main__":
    main()
