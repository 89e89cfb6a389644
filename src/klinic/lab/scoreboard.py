"""`python -m klinic.lab.scoreboard`: evaluates the doctor as a classifier of injected faults.

It trains every fault with each mechanism, severity and seed, and healthy runs. `--only` and
`--seeds` shorten it; `--out` saves every outcome and plots the confusion matrix.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from klinic.evidence.files import json_bytes
from klinic.evidence.writing import open_log
from klinic.faults import FAULTS, SECOND_FAULTS, Severity
from klinic.faults.base import Fault
from klinic.lab import healthy_recipes
from klinic.lab.scoreboard_outcome import (
    HEALTHY,
    REMOVED_COLUMNS,
    Outcome,
    causes_without_columns,
    confirm_by_replay,
    diagnose_run,
)
from klinic.lab.scoreboard_run import train_trial

MECHANISMS: dict[int, tuple[Fault, ...]] = {1: FAULTS, 2: SECOND_FAULTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the scoreboard, by names that a worker process resolves."""

    cause: str
    mechanism: int
    """1 or 2; 0 for a healthy run."""
    severity: str
    seed: int


def list_trials(only: Sequence[str], seeds: int, severities: Sequence[str]) -> Iterator[Trial]:
    """Yield the trials of the scoreboard, or of the causes in `only`."""
    for number, faults in MECHANISMS.items():
        for fault in faults:
            if only and fault.cause not in only:
                continue
            for severity in severities:
                for seed in range(seeds):
                    yield Trial(cause=fault.cause, mechanism=number, severity=severity, seed=seed)
    if not only or HEALTHY in only:
        for name, seed, _ in healthy_recipes.healthy_runs(seeds):
            yield Trial(cause=HEALTHY, mechanism=0, severity=name, seed=seed)


def find_fault(trial: Trial) -> Fault | None:
    """Return the fault of a trial; None for a healthy run."""
    faults = MECHANISMS.get(trial.mechanism, ())
    return next((fault for fault in faults if fault.cause == trial.cause), None)


def run_trial(trial: Trial) -> Outcome:
    """Train the run of a trial and diagnose it."""
    began = time.monotonic()
    fault = find_fault(trial)
    settings = healthy_recipes.VARIANTS[trial.severity] if fault is None else {}
    folder = Path(tempfile.mkdtemp(prefix="klinic-trial-"))
    try:
        severity = Severity.NORMAL if fault is None else Severity(trial.severity)
        train_trial(folder / "run", fault, severity=severity, seed=trial.seed, **settings)
        diagnosis, failed = diagnose_run(folder / "run")
        without = causes_without_columns(folder / "run")
        proof = confirm_by_replay(folder / "run", diagnosis) if _needs_proof(trial) else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        cause=trial.cause,
        mechanism="" if fault is None else fault.mechanism,
        severity=trial.severity,
        seed=trial.seed,
        named=diagnosis.cause,
        ranked=failed,
        missing=diagnosis.missing,
        first_step=diagnosis.first_step,
        without=without,
        seconds=time.monotonic() - began,
        visible_at_start=fault is not None and fault.visible_at_start,
        proved=proof,
    )


def failed_outcome(trial: Trial, error: BaseException) -> Outcome:
    """Return the outcome of a failed trial, which counts neither as right nor as abstained."""
    fault = find_fault(trial)
    return Outcome(
        cause=trial.cause,
        mechanism="" if fault is None else fault.mechanism,
        severity=trial.severity,
        seed=trial.seed,
        named=None,
        ranked=(),
        missing=(),
        first_step=None,
        without=dict.fromkeys(REMOVED_COLUMNS),
        seconds=float("nan"),
        error=" ".join(f"{type(error).__name__}: {error}".split())[:300],
    )


def _needs_proof(trial: Trial) -> bool:
    """Return whether to confirm a trial by replay: one seed per cause is enough."""
    return trial.mechanism == 1 and trial.seed == 0 and trial.severity == Severity.NORMAL


def summarize_outcomes(outcomes: dict[int, list[Outcome]]) -> dict[str, Any]:
    """Return the figures of the scoreboard, as fractions."""
    first = [o for o in outcomes[1] if o.severity == Severity.NORMAL]
    second = [o for o in outcomes[2] if o.severity == Severity.NORMAL]
    well = outcomes[0]
    return {
        "trainer": "klinic",
        "cases": sum(len(outcomes[number]) for number in (1, 2)),
        **_outcome_rates(first),
        "mild_top1": _outcome_rates([o for o in outcomes[1] if o.severity == Severity.MILD])[
            "top1"
        ],
        "errors": sum(o.error is not None for each in outcomes.values() for o in each),
        "healthy_runs": len(well),
        "false_alarms": sum(o.named is not None for o in well),
        "second_mechanism_top1": _outcome_rates(second)["top1"],
        "second_mechanism": _outcome_rates(second),
        "before_first_commit": _true_fraction(
            o.first_step == 1 for o in first if o.visible_at_start
        ),
        "without": {name: _rates_without_column(first + second, name) for name in REMOVED_COLUMNS},
        "proved": _true_fraction(o.proved for o in outcomes[1] if o.proved is not None),
        "by_cause": {o.cause: _cause_rates(o.cause, outcomes) for o in outcomes[1]},
    }


def _outcome_rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        "top1": _true_fraction(o.is_right for o in outcomes),
        "top3": _true_fraction(o.is_right or o.cause in o.ranked[:3] for o in outcomes),
        "abstained": _true_fraction(o.is_abstention for o in outcomes),
        "wrong": _true_fraction(o.is_wrong for o in outcomes),
    }


def _rates_without_column(outcomes: Sequence[Outcome], column: str) -> dict[str, float]:
    named = [(o.cause, o.without[column]) for o in outcomes if o.error is None]
    return {
        "top1": _true_fraction(cause == name for cause, name in named),
        "abstained": _true_fraction(name is None for _, name in named),
        "wrong": _true_fraction(name is not None and name != cause for cause, name in named),
    }


def _cause_rates(cause: str, outcomes: dict[int, list[Outcome]]) -> dict[str, Any]:
    def rate(number: int, severity: str) -> float:
        return _true_fraction(
            o.is_right for o in outcomes[number] if (o.cause, o.severity) == (cause, severity)
        )

    return {
        "normal": rate(1, Severity.NORMAL),
        "mild": rate(1, Severity.MILD),
        "second_normal": rate(2, Severity.NORMAL),
        "second_mild": rate(2, Severity.MILD),
        "also_named": dict(
            Counter(
                "error" if o.error is not None else o.named or "none"
                for n in (1, 2)
                for o in outcomes[n]
                if o.cause == cause
            )
        ),
    }


def _true_fraction(values: Iterable[bool]) -> float:
    flags = list(values)
    return sum(flags) / len(flags) if flags else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the scoreboard and print the results."""
    parser = argparse.ArgumentParser(prog="python -m klinic.lab.scoreboard", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="CAUSE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--severities", nargs="*", default=[str(s) for s in Severity])
    parser.add_argument("--mechanisms", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for outcomes.jsonl and confusion.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    wanted = [
        trial
        for trial in list_trials(options.only, options.seeds, options.severities)
        if trial.mechanism in options.mechanisms
    ]
    outcomes = run_trials(wanted, options.processes, options.out)
    figures = summarize_outcomes(outcomes)
    if options.json:
        sys.stdout.write(json.dumps({"command": "scoreboard", **figures}) + "\n")
    else:
        from klinic.lab.score_table import print_scoreboard

        print_scoreboard(figures, outcomes, Console())
    if options.out is not None:
        from klinic.lab.confusion import plot_confusion

        looked = [o for n in (1, 2, 0) for o in outcomes[n] if o.error is None]
        plot_confusion(looked, options.out / "confusion.png")


def run_trials(
    wanted: Sequence[Trial], processes: int, out: Path | None
) -> dict[int, list[Outcome]]:
    """Run all trials in a process pool; return the outcomes by mechanism."""
    outcomes: dict[Trial, Outcome] = {}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(run_trial, trial): trial for trial in wanted}
        done = track(as_completed(jobs), total=len(jobs), console=Console(stderr=True))
        for job in done:
            trial = jobs[job]
            error = job.exception()
            outcomes[trial] = job.result() if error is None else failed_outcome(trial, error)
            if out is not None:
                with open_log(out / "outcomes.jsonl") as file:
                    entry = {"number": trial.mechanism, **outcomes[trial].to_json()}
                    file.write(json_bytes(entry) + b"\n")
    return {number: [outcomes[t] for t in wanted if t.mechanism == number] for number in (0, 1, 2)}


if __name__ == "__main__":
    main()
