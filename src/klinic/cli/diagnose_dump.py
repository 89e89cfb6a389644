"""Prints the diagnosis of another trainer's dump: what was read, the causes, and the scalars."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.cli.plain_text import echo_text
from klinic.cli.progress import show_progress
from klinic.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from klinic.doctor.dump_diagnosis import DumpContents, DumpDiagnosis
    from klinic.evidence.readers.dumps.find import DumpSource
    from klinic.evidence.readers.dumps.token_dump import TokenDump
    from klinic.evidence.readers.log import ScalarLog

OF_VERDICT = ("verdict", "cause", "confidence", "causes", "fix", "change", "first_step")
"""Keys of the verdict, which scalars give where the records show no fault."""


def diagnose_dumps(
    run: Path,
    sources: "Sequence[DumpSource]",
    names: "Mapping[str, str]",
    *,
    json: bool,
    every: bool,
) -> int:
    """Diagnose the most detailed dump of a run with its scalar log; return the exit code."""
    from klinic.doctor.dump_diagnosis import diagnose_dump

    dump = add_run_facts(sources[0].open(), run)
    log, unread = find_scalars(run, dump.path, names)
    with show_progress("Checking the steps") as progress:
        result = diagnose_dump(dump, log, progress)
    also = [f"{source.path} ({source.format})" for source in sources[1:]]
    if json:
        _print_json(result, also)
    else:
        for line in _source_lines(result, also, unread):
            echo_text(line, hang=2)
        _print_findings(result, run, every=every)
    return 1 if result.sick else 0


def find_scalars(
    run: Path, dump: Path, names: "Mapping[str, str]"
) -> "tuple[ScalarLog | None, str]":
    """Return the scalar log in the folder of a run, of its dump, or in a sub-folder, or why not."""
    from klinic.evidence.readers.run_folders import folders_of_logs

    reasons = []
    for folder in dict.fromkeys((run, dump, *folders_of_logs(run))):
        log, reason = _read_scalars(folder, names)
        if log is not None:
            return log, ""
        reasons.append(reason)
    return None, next(filter(None, reasons), "")


def _read_scalars(run: Path, names: "Mapping[str, str]") -> "tuple[ScalarLog | None, str]":
    from klinic.evidence.readers.dumps.torch_files import advise_convert
    from klinic.evidence.readers.find import read_log
    from klinic.evidence.readers.run_folders import join_parts

    if not run.is_dir():
        return None, ""
    try:
        log = join_parts(read_log(run, names), run)
    except EvidenceError as error:
        is_dump_alone = "has no records" in str(error) or str(error) == advise_convert(run)
        return None, "" if is_dump_alone else str(error)
    return (None, "") if log.format == "Rollouts" else (log, "")


def add_run_facts(dump: "TokenDump", run: Path) -> "TokenDump":
    """Return the dump with the facts of a run.json of klinic's format in its folder, if any."""
    from klinic.evidence.files import read_json
    from klinic.evidence.run_facts import RUN_FACTS

    path = (run if run.is_dir() else run.parent) / RUN_FACTS
    facts = read_json(path) if path.is_file() else {}
    return replace(dump, facts={**dump.facts, **facts}) if "schema" in facts else dump


def _source_lines(result: "DumpDiagnosis", also: list[str], unread: str) -> list[str]:
    contents, dump = result.contents, result.dump
    first, last, num = min(contents.steps), max(contents.steps), len(contents.steps)
    span = f"step {first}" if num == 1 else f"{num} steps, {first} to {last}"
    total = len(result.records.hypotheses)
    lines = [
        f"{dump.format[0].upper()}{dump.format[1:]}, {span}: {dump.path}",
        f"Read: {', '.join(field_names(contents, dump))}. Not in this format: {dump.lacks}.",
        f"{result.num_decided} of {total} checks have the evidence they need.",
    ]
    if result.scalars is not None:
        log = result.scalars.log
        joined = f", joined by step: {', '.join(contents.joined)}" if contents.joined else ""
        lines.append(f"Scalars: {log.format}, {log.files[0]}{joined}.")
        also = [*also, *log.also]
    if unread:
        lines.append(f"Scalars were not read. {unread}")
    if also:
        lines.append(f"Present but not read: {', '.join(also)}")
    return [*lines, ""]


def field_names(contents: "DumpContents", dump: "TokenDump") -> list[str]:
    """Return the fields that were read; tokens that stand for characters are texts."""
    if not dump.has_texts_only:
        return contents.names
    of_texts = ("token_ids", "loss_mask", "prompt_ids")
    return ["texts", *(name for name in contents.names if name not in of_texts)]


def _print_findings(result: "DumpDiagnosis", run: Path, *, every: bool) -> None:
    from rich.console import Console

    from klinic.cli.diagnosis_view import print_diagnosis, print_every, print_others
    from klinic.cli.log_view import print_failed_signs
    from klinic.cli.text_layout import print_text

    console = Console(highlight=False)
    if result.scalars is not None and result.scalars.sick:
        print_failed_signs(result.scalars, console)
    if result.records.sick or not result.is_of_scalars:
        print_diagnosis(result.records, console, run=run, every=every)
        return
    # no headline of the records: a sick run does not end with the line of a healthy one
    print_text(console, f"Token records: no check failed, {result.num_decided} had their evidence.")
    (print_every if every else print_others)(result.records, console)


def _print_json(result: "DumpDiagnosis", also: list[str]) -> None:
    from klinic.cli.printing import print_json

    contents = result.contents
    content: dict[str, Any] = result.records.to_json()
    if result.is_of_scalars and result.scalars is not None:
        of_scalars = result.scalars.to_json()
        content |= {name: of_scalars[name] for name in OF_VERDICT}
    read = {
        "format": result.dump.format,
        "files": [str(result.dump.path)],
        "steps": len(contents.steps),
        "first_step": min(contents.steps),
        "last_step": max(contents.steps),
        "fields": contents.names,
        "joined": contents.joined,
        "facts": contents.facts,
        "decided": result.num_decided,
        "lacks": result.dump.lacks,
        "not_read": also,
    }
    scalars = None if result.scalars is None else result.scalars.to_json()
    extra = {"evidence": "records", **content, "read": read, "scalars": scalars}
    print_json("diagnose", ok=not result.sick, **extra)
