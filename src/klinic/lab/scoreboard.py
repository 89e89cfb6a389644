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
from klinic.faults import FAULTS, Severity
from klinic.faults.base import Fault
from klinic.faults.second import SECOND
from klinic.lab import healthy
from klinic.lab.outcome import HEALTHY, WITHOUT, Outcome, look, named_without, proved
from klinic.lab.trial import make

MECHANISMS: dict[int, tuple[Fault, ...]] = {1: FAULTS, 2: SECOND}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the scoreboard, by names that a worker process resolves."""

    cause: str
    mechanism: int
    """1 or 2; 0 for a healthy run."""
    severity: str
    seed: int


def trials(only: Sequence[str], seeds: int, severities: Sequence[str]) -> Iterator[Trial]:
    """Yield the trials of the scoreboard, or of the causes in `only`."""
    for number, faults in MECHANISMS.items():
        for fault in faults:
            if only and fault.cause not in only:
                continue
            for severity in severities:
                for seed in range(seeds):
                    yield Trial(cause=fault.cause, mechanism=number, severity=severity, seed=seed)
    if not only or HEALTHY in only:
        for name, seed, _ in healthy.runs():
            yield Trial(cause=HEALTHY, mechanism=0, severity=name, seed=seed)


def outcome(trial: Trial) -> Outcome:
    """Train the run of a trial and diagnose it."""
    began = time.monotonic()
    fault = _fault(trial)
    settings = healthy.VARIANTS[trial.severity] if fault is None else {}
    folder = Path(tempfile.mkdtemp(prefix="klinic-trial-"))
    try:
        severity = Severity.NORMAL if fault is None else Severity(trial.severity)
        make(folder / "run", fault, severity=severity, seed=trial.seed, **settings)
        found, failed = look(folder / "run")
        without = named_without(folder / "run")
        proof = proved(folder / "run", found) if _to_prove(trial) else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        cause=trial.cause,
        mechanism="" if fault is None else fault.mechanism,
        severity=trial.severity,
        seed=trial.seed,
        named=found.cause,
        ranked=failed,
        missing=found.missing,
        first_step=found.first_step,
        without=without,
        seconds=time.monotonic() - began,
        visible_at_start=fault is not None and fault.visible_at_start,
        proved=proof,
    )


def thrown(trial: Trial, error: BaseException) -> Outcome:
    """Return the outcome of a failed trial, which counts neither as right nor as abstained."""
    fault = _fault(trial)
    return Outcome(
        cause=trial.cause,
        mechanism="" if fault is None else fault.mechanism,
        severity=trial.severity,
        seed=trial.seed,
        named=None,
        ranked=(),
        missing=(),
        first_step=None,
        without=dict.fromkeys(WITHOUT),
        seconds=float("nan"),
        error=" ".join(f"{type(error).__name__}: {error}".split())[:300],
    )


def _to_prove(trial: Trial) -> bool:
    """Return whether to confirm a trial by replay: one seed per cause is enough."""
    return trial.mechanism == 1 and trial.seed == 0 and trial.severity == Severity.NORMAL


def _fault(trial: Trial) -> Fault | None:
    faults = MECHANISMS.get(trial.mechanism, ())
    return next((fault for fault in faults if fault.cause == trial.cause), None)


def summary(outcomes: dict[int, list[Outcome]]) -> dict[str, Any]:
    """Return the figures of the scoreboard, as fractions."""
    first = [o for o in outcomes[1] if o.severity == Severity.NORMAL]
    second = [o for o in outcomes[2] if o.severity == Severity.NORMAL]
    well = outcomes[0]
    return {
        "trainer": "klinic",
        "cases": sum(len(outcomes[number]) for number in (1, 2)),
        **_rates(first),
        "mild_top1": _rates([o for o in outcomes[1] if o.severity == Severity.MILD])["top1"],
        "errors": sum(o.error is not None for each in outcomes.values() for o in each),
        "healthy_runs": len(well),
        "false_alarms": sum(o.named is not None for o in well),
        "second_mechanism_top1": _rates(second)["top1"],
        "second_mechanism": _rates(second),
        "before_first_commit": _share(o.first_step == 1 for o in first if o.visible_at_start),
        "without": {name: _degraded(first + second, name) for name in WITHOUT},
        "proved": _share(o.proved for o in outcomes[1] if o.proved is not None),
        "by_cause": {o.cause: _of_cause(o.cause, outcomes) for o in outcomes[1]},
    }


def _rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        "top1": _share(o.right for o in outcomes),
        "top3": _share(o.right or o.cause in o.ranked[:3] for o in outcomes),
        "abstained": _share(o.abstained for o in outcomes),
        "wrong": _share(o.wrong for o in outcomes),
    }


def _degraded(outcomes: Sequence[Outcome], column: str) -> dict[str, float]:
    named = [(o.cause, o.without[column]) for o in outcomes if o.error is None]
    return {
        "top1": _share(cause == name for cause, name in named),
        "abstained": _share(name is None for _, name in named),
        "wrong": _share(name is not None and name != cause for cause, name in named),
    }


def _of_cause(cause: str, outcomes: dict[int, list[Outcome]]) -> dict[str, Any]:
    def rate(number: int, severity: str) -> float:
        return _share(
            o.right for o in outcomes[number] if (o.cause, o.severity) == (cause, severity)
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


def _share(values: Iterable[bool]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else float("nan")


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
    given = parser.parse_args(arguments)
    wanted = [
        trial
        for trial in trials(given.only, given.seeds, given.severities)
        if trial.mechanism in given.mechanisms
    ]
    outcomes = measured(wanted, given.processes, given.out)
    figures = summary(outcomes)
    if given.json:
        sys.stdout.write(json.dumps({"command": "scoreboard", **figures}) + "\n")
    else:
        from klinic.lab.score_table import show

        show(figures, outcomes, Console())
    if given.out is not None:
        from klinic.lab.confusion import draw

        looked = [o for n in (1, 2, 0) for o in outcomes[n] if o.error is None]
        draw(looked, given.out / "confusion.png")


def measured(wanted: Sequence[Trial], processes: int, out: Path | None) -> dict[int, list[Outcome]]:
    """Run all trials in a process pool; return the outcomes by mechanism."""
    found: dict[Trial, Outcome] = {}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(outcome, trial): trial for trial in wanted}
        done = track(as_completed(jobs), total=len(jobs), console=Console(stderr=True))
        for job in done:
            trial = jobs[job]
            error = job.exception()
            found[trial] = job.result() if error is None else thrown(trial, error)
            if out is not None:
                with open_log(out / "outcomes.jsonl") as file:
                    entry = {"number": trial.mechanism, **found[trial].to_json()}
                    file.write(json_bytes(entry) + b"\n")
    return {number: [found[t] for t in wanted if t.mechanism == number] for number in (0, 1, 2)}


if __name__ == "__main__":
    main()
