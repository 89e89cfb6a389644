"""Prints the diagnosis of a scalar log: certain findings, possible causes, missing evidence."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from klinic.cli.printing import print_json
from klinic.errors import EvidenceError
from klinic.harmless import harmless

if TYPE_CHECKING:
    from klinic.doctor.scalars.examine import ScalarDiagnosis

ONLY = (
    "Scalars only: step means show that something is wrong, but seldom the cause. Causes with "
    "the same scalars are listed together."
)
MOST_NAMED = 8  # unread metrics named in a sentence
TELLING = ("kl", "reward", "score", "logp", "prob")  # substrings of names listed first


def diagnose_scalars(path: Path, *, json: bool) -> int:
    """Print the diagnosis of a log; return 1 if a sign failed, raise if the log is unread."""
    from klinic.doctor.scalars.examine import examine
    from klinic.evidence.readers.find import read_log

    found = examine(read_log(path))
    if json:
        print_json("diagnose", ok=found.verdict == "well", **found.to_json())
    if found.verdict == "unread":
        raise EvidenceError(f"{path}: {_unread(found)}")
    if not json:
        for line in lines(found):
            typer.echo(harmless(line))
    return 1 if found.sick else 0


def _unread(found: "ScalarDiagnosis") -> str:
    read = ", ".join(found.log.written_as.values())
    return " ".join(
        [
            f"is unread. {' '.join(_coverage(found))}. Read: {read}. That does not suffice for a",
            "diagnosis. Give a log that has one of the missing metrics, under a name",
            "listed in docs/how-to/other-trainers.md.",
        ]
    )


def lines(found: "ScalarDiagnosis") -> list[str]:
    """Return the lines printed for people."""
    from klinic.doctor.scalars.examine import fix_of
    from klinic.evidence.verdict import Verdict

    log = found.log
    steps = f"{len(log.steps)} logged steps, {log.steps[0]} to {log.steps[-1]}"
    writer = f"of {log.trainer.name}" if log.trainer.recognised else "(trainer not recognised)"
    said = [*_coverage(found), f"{log.format} {writer}, {steps}: {log.files[0]}", ONLY]
    if log.also:
        said.append(f"Present but not read: {', '.join(log.also)}")
    if log.num_skipped:
        said.append(f"{log.num_skipped} values or lines were not numeric and were skipped.")
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
        said.append("klinic explain NAME describes a sign or a cause.")
    return said


def _coverage(found: "ScalarDiagnosis") -> list[str]:
    """Return which metrics were read and which were not; printed first."""
    from klinic.doctor.scalars.examine import CORE

    log = found.log
    read, total = len(log.written_as), len(log.written_as) + len(log.unknown)
    names = found.not_found or tuple(CORE)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    were = "was" if len(names) == 1 else "were"
    was_found = f"{were} {'not found' if found.not_found else 'found'} in this log"
    said = [f"{listed[0].upper()}{listed[1:]} {was_found}; {read} of {total} metrics were read."]
    if log.unknown:
        likely = sorted(log.unknown, key=lambda n: not any(part in n.lower() for part in TELLING))
        more = len(likely) - MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        said.append(f"Not read: {', '.join(name[:80] for name in likely[:MOST_NAMED])}{rest}")
    return said


ORDER = ("fail", "warn", "no data", "pass")


def _headline(found: "ScalarDiagnosis") -> str:
    from klinic.evidence.verdict import Verdict

    failed = found.of(Verdict.FAIL)
    if not failed:
        return "No sign of trouble in the metrics read. Other causes stay undecided."
    sign, heard = failed[0]
    if found.cause is not None:
        return f"Cause: {found.cause}, first seen in step {heard.step} ({sign.name})"
    return f"Sick: {sign.name}, first seen in step {heard.step}. No cause can be named."
