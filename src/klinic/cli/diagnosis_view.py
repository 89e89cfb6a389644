"""Prints a diagnosis of records: verdict, evidence, fix, proof, and a count of the other causes."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from klinic.cli.proof import find_obstacle
from klinic.cli.text_layout import print_commands, print_numbered, print_text, print_title
from klinic.doctor.hypothesis import Status
from klinic.evidence.verdict import RunVerdict, Verdict

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.cli.proof import ProofAttempt
    from klinic.doctor.diagnosis import Cause, Diagnosis
    from klinic.doctor.hypothesis import Hypothesis

MARK_STYLES = {"✗": "bold red", "-": "yellow", "!": "yellow", "✓": "green", "?": "dim"}
TITLES = {
    Status.CONFIRMED: "Failed:",
    Status.EXPLAINED: "Failed, as an effect of a cause above:",
    Status.RULED_OUT: "Ruled out:",
    Status.UNDECIDED: "Undecided:",
}


def print_diagnosis(
    diagnosis: "Diagnosis",
    console: "Console",
    *,
    run: Path,
    every: bool = False,
    attempt: "ProofAttempt | None" = None,
) -> None:
    """Print verdict, evidence, fixes and proof; the other causes are counted, or listed."""
    print_cause(diagnosis, console)
    if attempt is not None:
        print_proof(attempt, console)
    if diagnosis.cause is not None:
        _print_commands(diagnosis, console, run, prove=attempt is None)
    if every:
        print_every(diagnosis, console)
    else:
        print_others(diagnosis, console)


def print_cause(diagnosis: "Diagnosis", console: "Console") -> None:
    """Print the verdict, the evidence, the fixes, and the causes that are not excluded."""
    print_text(console, diagnosis.headline, style=_headline_style(diagnosis))
    for cause in diagnosis.causes[1:]:
        where = "" if cause.first_step is None else f", first seen in step {cause.first_step}"
        print_text(console, f"Also: {cause.name} ({cause.confidence:.0%}){where}", style="bold red")
    shown = _evidence(diagnosis)
    if shown:
        print_title(console, "Evidence:")
    for hypothesis in shown:
        _print_finding(hypothesis, console)
    for cause in diagnosis.causes:
        _print_fix(cause, console, of=cause.name if len(diagnosis.causes) > 1 else "")
    _print_open_questions(diagnosis, console)


def _print_open_questions(diagnosis: "Diagnosis", console: "Console") -> None:
    """Print the causes that are not excluded, or the fields that would decide more."""
    missing = f"Not recorded, and would decide more: {', '.join(diagnosis.missing)}"
    sentence = diagnosis.rivals_sentence or (missing if diagnosis.missing else "")
    for text in (sentence, diagnosis.dropped.sentence):
        if text:
            console.print()
            print_text(console, text)


def print_proof(attempt: "ProofAttempt", console: "Console") -> None:
    """Print the result of replaying the blamed step, or why it was not replayed."""
    proof = attempt.proof
    console.print()
    if proof is None:
        print_text(console, f"not possible: {attempt.obstacle}", label="Proof: ")
        return
    print_text(
        console,
        f"{'confirmed' if proof.confirmed else 'not confirmed'}. Step {proof.step} replayed, "
        f"changed: {proof.changed}.",
        label="Proof: ",
    )
    print_text(
        console,
        f"{proof.quantity}: {proof.before:.4g} before, {proof.after:.4g} after",
        indent=(2, 4),
    )


def print_others(diagnosis: "Diagnosis", console: "Console") -> None:
    """Print how many causes are ruled out, and how many have no evidence."""
    ruled_out = len(diagnosis.with_status(Status.RULED_OUT))
    no_data = sum(1 for h in diagnosis.with_status(Status.UNDECIDED) if not h.num_warned)
    counts = ((ruled_out, "ruled out"), (no_data, "without evidence"))
    parts = [f"{number} {status}" for number, status in counts if number]
    if parts:
        console.print()
        print_text(console, f"{', '.join(parts)} (`--all` lists them)", style="dim")


def _headline_style(diagnosis: "Diagnosis") -> str:
    if diagnosis.verdict is RunVerdict.NONE and not diagnosis.sick:
        return "bold green"
    return "bold yellow" if diagnosis.verdict is RunVerdict.LIKELY else "bold red"


def _evidence(diagnosis: "Diagnosis") -> "list[Hypothesis]":
    """Return the failed checks, the causes first, and the checks that warned."""
    names = [cause.name for cause in diagnosis.causes]
    order = {Status.CONFIRMED: 0, Status.EXPLAINED: 1, Status.UNDECIDED: 2, Status.RULED_OUT: 3}
    shown = [h for h in diagnosis.hypotheses if h.num_failed or h.num_warned]
    return sorted(
        shown,
        key=lambda h: (
            names.index(h.check.name) if h.check.name in names else len(names),
            order[h.status],
            h.check.stage,
        ),
    )


def _print_finding(hypothesis: "Hypothesis", console: "Console") -> None:
    """Print a check with its summary."""
    finding = hypothesis.finding
    warned = finding is not None and finding.verdict is Verdict.WARN
    mark = Verdict.WARN.mark if warned else hypothesis.status.mark
    summary = "" if finding is None else finding.summary
    print_text(
        console,
        summary,
        label=f"{mark} {hypothesis.check.name}: ",
        label_style=MARK_STYLES[mark],
        indent=(2, 4),
    )


def _print_fix(cause: "Cause", console: "Console", *, of: str) -> None:
    """Print the steps in the settings of the run's trainer, or the fix with recipe keys."""
    order = ", the most likely step first" if len(cause.steps) > 1 else ""
    print_title(console, f"Fix{f' of {of}' if of else ''}{order}:")
    print_numbered(console, cause.steps or (cause.fix,))
    for key, value in cause.change.items():
        print_text(console, f"{key}: {value}", indent=(5, 7))


def print_every(diagnosis: "Diagnosis", console: "Console") -> None:
    """Print every check with its summary, by status."""
    for status, title in TITLES.items():
        hypotheses = diagnosis.with_status(status)
        if hypotheses:
            print_title(console, title)
        for hypothesis in sorted(hypotheses, key=lambda h: h.check.stage):
            _print_finding(hypothesis, console)


def _print_commands(diagnosis: "Diagnosis", console: "Console", run: Path, *, prove: bool) -> None:
    """Print the commands that prove the cause and describe its check."""
    commands = [(f"klinic explain {diagnosis.cause}", "how the check decides, and similar causes")]
    if prove and not find_obstacle(run, diagnosis):
        command = f"klinic diagnose {shlex.quote(str(run))} --prove"
        commands.insert(0, (command, f"replay step {diagnosis.first_step} with one change"))
    print_commands(console, *commands)
