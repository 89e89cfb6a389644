"""Prints the diagnosis of a scalar log: verdict, metrics that were read, what to do, evidence."""

from typing import TYPE_CHECKING

from klinic.cli.text_layout import print_numbered, print_text, print_title
from klinic.doctor.scalars.sentences import (
    MAX_NAMED,
    coverage_lines,
    headline_text,
    sort_unread,
    source_lines,
)
from klinic.evidence.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from klinic.doctor.scalars.check import ScalarCheck, ScalarFinding
    from klinic.doctor.scalars.examine import ScalarDiagnosis

MARK_STYLES = {"✗": "bold red", "!": "yellow", "✓": "green", "?": "dim"}
SHOWN, FOLDED = (Verdict.FAIL, Verdict.WARN), (Verdict.NO_DATA, Verdict.PASS)
FOLDED_NAMES = {Verdict.PASS: "passed", Verdict.NO_DATA: "without data"}

Findings = list[tuple["ScalarCheck", "ScalarFinding"]]


def print_log_diagnosis(
    diagnosis: "ScalarDiagnosis", console: "Console", *, every: bool = False
) -> None:
    """Print verdict, what was read, first steps and evidence; `every` adds the other signs."""
    style = "bold red" if diagnosis.sick else "bold green"
    print_text(console, headline_text(diagnosis), style=style)
    for line in (*coverage_lines(diagnosis), *source_lines(diagnosis)):
        print_text(console, line)
    _print_first_steps(diagnosis, console)
    shown = _findings(diagnosis, (*SHOWN, *FOLDED) if every else SHOWN)
    if shown:
        print_title(console, "Evidence:")
    for sign, finding in shown:
        _print_sign(sign, finding, console)
    _print_closing(diagnosis, console, every=every)


def print_failed_signs(diagnosis: "ScalarDiagnosis", console: "Console") -> None:
    """Print the verdict on scalars and their failed signs, above a diagnosis of records."""
    print_text(console, f"Scalars: {headline_text(diagnosis)}", style="bold red")
    for sign, finding in _findings(diagnosis, (Verdict.FAIL,)):
        _print_sign(sign, finding, console)
    console.print()


def unread_message(diagnosis: "ScalarDiagnosis") -> str:
    """Return why a log cannot be diagnosed, and how to name the metrics that it needs."""
    log = diagnosis.log
    read = ", ".join(log.written_as.values())
    names = ", ".join(name[:40] for name in sort_unread(log.unknown)[:MAX_NAMED]) or "nothing else"
    return (
        f"has no KL, no reward and no sampler gap under a name that klinic knows. Read: {read}. "
        f"Not read: {names}. If one of these is the KL to the reference or the reward, say so: "
        "--metric kl=NAME --metric reward=NAME."
    )


def _print_first_steps(diagnosis: "ScalarDiagnosis", console: "Console") -> None:
    """Print what to do first: the steps of the one cause, or one step for each likely cause."""
    from klinic.doctor.scalars.examine import NUM_LIKELY

    if not diagnosis.causes:
        return
    if diagnosis.cause is not None:
        print_title(console, "Fix:")
        print_numbered(console, diagnosis.causes[0].steps)
        return
    print_title(console, "Do this first:")
    likely = diagnosis.causes[:NUM_LIKELY]
    print_numbered(console, [f"{cause.name}: {cause.steps[0]}" for cause in likely])


def _findings(diagnosis: "ScalarDiagnosis", verdicts: "Iterable[Verdict]") -> Findings:
    return [pair for verdict in verdicts for pair in diagnosis.with_verdict(verdict)]


def _print_sign(sign: "ScalarCheck", finding: "ScalarFinding", console: "Console") -> None:
    mark = finding.verdict.mark
    label, style = f"{mark} {sign.name}: ", MARK_STYLES[mark]
    print_text(console, finding.summary, label=label, label_style=style, indent=(2, 4))
    if finding.could_be:
        causes = f"could be: {', '.join(finding.could_be)}"
        print_text(console, causes, indent=(4, 6))


def _print_closing(diagnosis: "ScalarDiagnosis", console: "Console", *, every: bool) -> None:
    """Print how to learn more, and how many signs are not shown."""
    console.print()
    needed = diagnosis.sick and diagnosis.cause is None
    more = "To name the cause, record tokens." if needed else "Token records show more."
    print_text(console, f"{more} {diagnosis.log.trainer.klinic_records}")
    if diagnosis.sick:
        print_text(console, "klinic explain NAME describes a sign or a cause.")
    counts = [
        (len(diagnosis.with_verdict(v)), FOLDED_NAMES[v]) for v in (Verdict.PASS, Verdict.NO_DATA)
    ]
    parts = [f"{number} {name}" for number, name in counts if number]
    if parts and not every:
        print_text(console, f"{', '.join(parts)} (`--all` lists them)", style="dim")
