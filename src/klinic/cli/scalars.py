"""A log of scalars, for people and machines: what is certain, what it could be, what would tell."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from klinic.cli.printing import print_json
from klinic.harmless import harmless

if TYPE_CHECKING:
    from klinic.doctor.scalars.examine import ScalarDiagnosis

ONLY = (
    "Scalars only: means over a step show that something is wrong, and seldom what. Causes that "
    "leave the same scalars are listed together."
)


def diagnose_scalars(path: Path, *, json: bool) -> int:
    """Print what a log says; return the exit code: 1 where a sign failed."""
    from klinic.doctor.scalars.examine import examine
    from klinic.evidence.readers.find import read_log

    found = examine(read_log(path))
    if json:
        print_json("diagnose", ok=not found.sick, **found.to_json())
    else:
        for line in lines(found):
            typer.echo(harmless(line))
    return 1 if found.sick else 0


def lines(found: "ScalarDiagnosis") -> list[str]:
    """Return what is printed for people."""
    from klinic.doctor.scalars.examine import fix_of
    from klinic.evidence.verdict import Verdict

    log = found.log
    steps = f"{len(log.steps)} logged steps, {log.steps[0]} to {log.steps[-1]}"
    said = [f"{log.format} of {log.trainer.name}, {steps}: {log.files[0]}", ONLY]
    if log.also:
        said.append(f"Also there and not read: {', '.join(log.also)}")
    if log.num_skipped:
        said.append(f"{log.num_skipped} values or lines were no numbers and were left out.")
    failed = found.of(Verdict.FAIL)
    said += ["", _headline(found)]
    if found.cause is not None:
        said.append(f"Fix: {fix_of(found.cause)}")
    said.append("")
    for sign, heard in sorted(found.heard, key=lambda pair: list(ORDER).index(pair[1].says)):
        said.append(f"{heard.says.mark} {sign.name}: {heard.summary}")
        if heard.could_be:
            said.append(f"    could be: {', '.join(heard.could_be)}")
    said += ["", f"Would decide {'which' if failed else 'more'}: {', '.join(found.missing)}"]
    said.append(log.trainer.klinic_records)
    if failed:
        said.append("klinic explain NAME says what a sign or a cause is.")
    return said


ORDER = ("fail", "warn", "no data", "pass")


def _headline(found: "ScalarDiagnosis") -> str:
    from klinic.evidence.verdict import Verdict

    failed = found.of(Verdict.FAIL)
    if not failed:
        return "No sign of trouble. What scalars cannot show stays undecided."
    sign, heard = failed[0]
    if found.cause is not None:
        return f"Cause: {found.cause}, first seen in step {heard.step} ({sign.name})"
    return f"Sick: {sign.name}, first seen in step {heard.step}. No cause can be named."
