"""`klinic diagnose RUN`: the root cause of a run, and its evidence; exit code 1 if there is one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.printing import print_json
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.doctor.diagnosis import Diagnosis, Hypothesis

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

MARKS = {"confirmed": "✗", "explained": "-", "ruled out": "✓", "undecided": "?"}


def diagnose(run: Run, json: Json = False) -> None:
    """Name the root cause of a run, with evidence, what was ruled out, and the fix."""
    from rich.console import Console

    from klinic.checks import CHECKS
    from klinic.doctor.diagnosis import diagnose as judge
    from klinic.doctor.reading import read_cases

    if not run.is_dir():
        raise ConfigError(f"{run} is no folder. Give the folder of a run, such as runs/arithmetic.")
    with Console(stderr=True).status("Reading the records ..."):
        found = judge(read_cases(run), CHECKS)
    if json:
        print_json("diagnose", ok=found.cause is None, **_fields(found))
    else:
        _print(found, Console(highlight=False))
    raise typer.Exit(0 if found.cause is None else 1)


def _fields(found: "Diagnosis") -> dict[str, Any]:
    from klinic.doctor.diagnosis import Status

    return {
        "cause": found.cause,
        "confidence": found.confidence,
        "findings": [_finding(h) for h in found.hypotheses],
        "ruled_out": [h.check.name for h in found.of(Status.RULED_OUT)],
        "missing": list(found.missing),
        "fix": found.fix,
        "change": dict(found.change),
        "first_step": found.first_step,
    }


def _finding(hypothesis: "Hypothesis") -> dict[str, Any]:
    finding = hypothesis.finding
    return {
        "name": hypothesis.check.name,
        "status": str(hypothesis.status),
        "verdict": None if finding is None else str(finding.verdict),
        "summary": "" if finding is None else finding.summary,
        "measured": {} if finding is None else dict(finding.measured),
        "first_step": hypothesis.first_step,
    }


def _print(found: "Diagnosis", console: "Console") -> None:
    def say(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    if found.cause is None:
        say("No cause was found." if not found.missing else "No cause can be named.")
    else:
        say(f"Cause: {found.cause}, first seen in step {found.first_step}")
        say(f"Fix: {found.fix}")
        for key, value in found.change.items():
            say(f"  {key}: {value}")
    say()
    for hypothesis in sorted(found.hypotheses, key=lambda h: h.check.stage):
        summary = "" if hypothesis.finding is None else hypothesis.finding.summary
        say(f"{MARKS[hypothesis.status]} {hypothesis.check.name}: {summary}")
    if found.missing:
        say(f"\nNot recorded, and would decide more: {', '.join(found.missing)}")
    if found.cause is not None:
        say(f"\nklinic explain {found.cause} says what was looked for.")
