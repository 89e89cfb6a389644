"""`python -m klinic.lab.pairs`: measures the doctor on runs with two faults at once.

Pairs of faults are drawn at random, both mechanisms of a cause included. Two faults whose settings
contradict one another are no pair.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from klinic.evidence.files import json_bytes
from klinic.evidence.writing import open_log
from klinic.faults import FAULTS, SECOND_FAULTS, Severity
from klinic.faults.base import Fault
from klinic.lab.scoreboard_outcome import diagnose_run
from klinic.lab.scoreboard_run import train_trial

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL_FAULTS = {(fault.cause, n): fault for n in (1, 2) for fault in (FAULTS, SECOND_FAULTS)[n - 1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPair:
    """Two faults of one run, by cause and mechanism (1 or 2)."""

    first: tuple[str, int]
    second: tuple[str, int]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    """The diagnosis of a run with two faults."""

    causes: tuple[str, str]
    named: tuple[str, ...]
    """The named causes, the most probable first."""
    residue: tuple[str, ...]
    """Failed checks that no named cause explains, causes that are not excluded, and warnings."""
    error: str | None = None

    @property
    def is_first_right(self) -> bool:
        """Whether the first named cause is one of the two."""
        return bool(self.named) and self.named[0] in self.causes

    @property
    def is_complete(self) -> bool:
        """Whether both are named, or the second is stated as residue."""
        return self.is_first_right and set(self.causes) <= {*self.named, *self.residue}


def draw_pairs(num: int, seed: int) -> list[FaultPair]:
    """Return random pairs of different causes with compatible settings."""
    stream = random.Random(seed)  # noqa: S311 - an experiment, not a secret
    pairs: list[FaultPair] = []
    while len(pairs) < num:
        first, second = stream.sample(sorted(ALL_FAULTS), 2)
        if (
            first[0] != second[0]
            and _merge_settings(ALL_FAULTS[first], ALL_FAULTS[second]) is not None
        ):
            pairs.append(FaultPair(first=first, second=second, seed=len(pairs)))
    return pairs


def _merge_settings(one: Fault, other: Fault) -> dict[str, Any] | None:
    """Return the settings of both faults; None if they contradict one another."""
    shared = one.settings.keys() & other.settings.keys()
    if any(one.settings[key] != other.settings[key] for key in shared):
        return None
    return {**one.settings, **other.settings}


def run_pair(pair: FaultPair) -> PairOutcome:
    """Train with both faults and diagnose the run."""
    first, second = ALL_FAULTS[pair.first], ALL_FAULTS[pair.second]

    @contextmanager
    def inject(severity: Severity) -> "Iterator[None]":
        with ExitStack() as stack:
            stack.enter_context(first.inject(severity))
            stack.enter_context(second.inject(severity))
            yield

    settings = _merge_settings(first, second)
    both = Fault(cause="", mechanism="", inject=inject, settings=settings or {})
    folder = Path(tempfile.mkdtemp(prefix="klinic-pair-"))
    try:
        train_trial(folder / "run", both, seed=pair.seed)
        diagnosis, _ = diagnose_run(folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rivals = [rival.name for rival in diagnosis.rivals if not rival.fields]
    warned = [h.check.name for h in diagnosis.hypotheses if h.num_warned and not h.num_failed]
    return PairOutcome(
        causes=(first.cause, second.cause),
        named=tuple(cause.name for cause in diagnosis.causes),
        residue=(*diagnosis.unexplained, *rivals, *warned),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pairs and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m klinic.lab.pairs", description=__doc__)
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the outcomes, one JSON object a line")
    options = parser.parse_args(arguments)
    outcomes = list(_run_pairs(options.num, options.seed, options.processes))
    if options.out is not None:
        with open_log(options.out) as file:
            file.writelines(json_bytes(asdict(outcome)) + b"\n" for outcome in outcomes)
    ran = [outcome for outcome in outcomes if outcome.error is None]
    figures = {
        "command": "pairs",
        "pairs": len(ran),
        "errors": len(outcomes) - len(ran),
        "first_right": sum(o.is_first_right for o in ran) / max(len(ran), 1),
        "complete": sum(o.is_complete for o in ran) / max(len(ran), 1),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def _run_pairs(num: int, seed: int, num_processes: int) -> "Iterator[PairOutcome]":
    """Run pairs until `num` of them have trained; two faults may replace the same function."""
    pairs = iter(draw_pairs(2 * num, seed))
    with (
        ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool,
        Progress(console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("pairs", total=num)
        jobs = {pool.submit(run_pair, pair): pair for pair in islice(pairs, num)}
        while jobs:
            job = next(as_completed(jobs))
            outcome = _outcome_of(job, jobs.pop(job))
            yield outcome
            if outcome.error is None:
                progress.advance(task)
            elif (pair := next(pairs, None)) is not None:
                jobs[pool.submit(run_pair, pair)] = pair


def _outcome_of(job: Any, pair: FaultPair) -> PairOutcome:
    if (error := job.exception()) is None:
        outcome: PairOutcome = job.result()
        return outcome
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return PairOutcome(causes=(pair.first[0], pair.second[0]), named=(), residue=(), error=text)


if __name__ == "__main__":
    main()
