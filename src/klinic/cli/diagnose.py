"""`klinic diagnose RUN`: the root cause of a run with evidence; exit code 1 if a check failed.

Of a scalar log it prints certain findings, possible causes and missing evidence.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from klinic.cli.printing import Json, print_json, print_line, require_modules
from klinic.cli.progress import NoCache, findings_cache, show_progress
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.errors import ConfigError, KlinicError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from klinic.checks.base import Case
    from klinic.doctor.diagnosis import Diagnosis
    from klinic.replay.proof import Proof

from typing import TYPE_CHECKING

from klinic.errors import EvidenceError
from klinic.runtime.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from klinic.doctor.scalars.examine import ScalarDiagnosis

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or the log of another trainer.",
        show_default=False,
    ),
]
Prove = Annotated[
    bool,
    typer.Option(
        "--prove",
        help="Replay the blamed step from the nearest checkpoint with one thing changed.",
    ),
]


def diagnose(
    run: Run,
    prove: Prove = False,
    run_code: RunCode = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Name the root cause of a run, with evidence, ruled-out causes, and the fix."""
    if run_code and not prove:
        raise ConfigError("--run-code needs --prove: diagnosing records runs no code.")
    from klinic.evidence.schema import refuse_newer

    try:
        refuse_newer(run)
        diagnosis = diagnose_records(run, prove=prove, no_cache=no_cache, json=json)
    except KlinicError:  # some are also an OSError
        raise
    except OSError as error:
        from klinic.evidence.files import unreadable_error

        raise unreadable_error(Path(error.filename or run), error) from error
    proof = prove_cause(run, diagnosis, run_code=run_code) if prove else None
    if json:
        proved = {} if not prove else {"proof": None if proof is None else asdict(proof)}
        print_diagnosis_json(diagnosis, **proved)
    else:
        from rich.console import Console

        _print_diagnosis(diagnosis, Console(highlight=False))
        if prove:
            print_proof(diagnosis, proof, Console(highlight=False))
    raise typer.Exit(1 if diagnosis.sick else 0)


def diagnose_records(run: Path, *, prove: bool, no_cache: bool, json: bool) -> "Diagnosis":
    """Return the diagnosis of a run's records; a run without records goes to `diagnose_other`."""
    from klinic.evidence.readers.find import has_records

    if not has_records(run):
        diagnose_other(run, prove=prove, json=json)
    import numpy as np

    from klinic.doctor.run_diagnosis import default_num_workers, diagnose_run

    # records may hold any value, and NumPy's warnings would name klinic's source lines
    with np.errstate(all="ignore"), show_progress("Checking the steps") as progress:
        return diagnose_run(
            run, cache=findings_cache(no_cache), workers=default_num_workers(), progress=progress
        )


def diagnose_other(run: Path, *, prove: bool, json: bool) -> NoReturn:
    """Diagnose another trainer's output: its token export, or else its scalars."""
    from klinic.evidence.readers import prime_rl_files

    if not run.exists():
        raise ConfigError(f"{run} does not exist. Give a run folder or a log.")
    if prove:
        raise ConfigError(
            f"{run} has no klinic records, and --prove replays a recorded step. Omit --prove."
        )
    tokens = prime_rl_files.find_exports(run)
    if tokens is None:
        raise typer.Exit(diagnose_scalars(run, json=json))
    from klinic.doctor.cases import prime_rl_cases

    diagnosis = apply_checks(prime_rl_cases(tokens))
    if json:
        print_diagnosis_json(
            diagnosis, read={"format": "prime-rl token export", "files": [str(tokens)]}
        )
    else:
        from rich.console import Console

        typer.echo(f"Token export of prime-rl, {tokens}: no rewards, no reference.\n")
        _print_diagnosis(diagnosis, Console(highlight=False))
    raise typer.Exit(1 if diagnosis.sick else 0)


def apply_checks(cases: "Iterator[Case]") -> "Diagnosis":
    """Apply every check to every case."""
    import numpy as np
    from rich.console import Console

    from klinic.checks import CHECKS
    from klinic.doctor.diagnosis import diagnose as judge

    with np.errstate(all="ignore"), Console(stderr=True).status("Reading the records ..."):
        return judge(cases, CHECKS)


def print_diagnosis_json(diagnosis: "Diagnosis", **extra: object) -> None:
    """Print a diagnosis of records as JSON."""
    content = {"evidence": "records", **diagnosis.to_json(), **extra}
    print_json("diagnose", ok=not diagnosis.sick, **content)


def prove_cause(run: Path, diagnosis: "Diagnosis", *, run_code: bool) -> "Proof | None":
    """Replay the first step that shows the cause; None without a cause."""
    from rich.console import Console

    if diagnosis.cause is None or diagnosis.first_step is None:
        return None
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    _announce_run_code(run, run_code=run_code)
    with Console(stderr=True).status(f"Replaying step {diagnosis.first_step} ..."):
        from klinic.replay.proof import prove_cause

        return prove_cause(run, diagnosis.cause, diagnosis.first_step, run_code=run_code)


def _announce_run_code(run: Path, *, run_code: bool) -> None:
    """Print which code of the run a replay executes or skips."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.recipe.recorded import load_recorded

    if (run / RECIPE).is_file():
        recorded = load_recorded(run / RECIPE, run_code=run_code)
        announce_code(recorded.allowed, recorded.refused)


def print_proof(diagnosis: "Diagnosis", proof: "Proof | None", console: "Console") -> None:
    """Print the result of replaying the blamed step."""
    if diagnosis.cause is None:
        return
    if proof is None:
        sentence = "not possible: no single change in a replay of this run would show this cause."
    else:
        sentence = (
            f"{'confirmed' if proof.confirmed else 'not confirmed'}. Step {proof.step} replayed, "
            f"changed: {proof.changed}.\n  {proof.quantity}: {proof.before:.4g} before, "
            f"{proof.after:.4g} after"
        )
    print_line(console, f"\nProof: {sentence}")


def print_cause(diagnosis: "Diagnosis", console: "Console") -> None:
    """Print the cause and its fix."""
    if diagnosis.cause is None:
        print_line(console, diagnosis.no_cause_message)
        return
    print_line(console, f"Cause: {diagnosis.cause}, first seen in step {diagnosis.first_step}")
    print_line(console, f"Fix: {diagnosis.fix}")
    for key, value in diagnosis.change.items():
        print_line(console, f"  {key}: {value}")


def _print_diagnosis(diagnosis: "Diagnosis", console: "Console") -> None:
    print_cause(diagnosis, console)
    print_line(console)
    for hypothesis in sorted(diagnosis.hypotheses, key=lambda h: h.check.stage):
        summary = "" if hypothesis.finding is None else hypothesis.finding.summary
        print_line(console, f"{hypothesis.status.mark} {hypothesis.check.name}: {summary}")
    if diagnosis.missing:
        print_line(
            console, f"\nNot recorded, and would decide more: {', '.join(diagnosis.missing)}"
        )
    if diagnosis.cause is not None:
        print_line(console, f"\nklinic explain {diagnosis.cause} describes the check.")


SCALARS_ONLY = (
    "Scalars only: step means show that something is wrong, but seldom the cause. Causes with "
    "the same scalars are listed together."
)
MAX_NAMED = 8  # unread metrics named in a sentence
LIKELY_NAME_PARTS = ("kl", "reward", "score", "logp", "prob")  # substrings of names listed first


def diagnose_scalars(path: Path, *, json: bool) -> int:
    """Print the diagnosis of a log; return 1 if a sign failed, raise if the log is unread."""
    from klinic.doctor.scalars.examine import examine_log
    from klinic.evidence.readers.find import read_log

    diagnosis = examine_log(read_log(path))
    if json:
        print_json("diagnose", ok=diagnosis.verdict == "well", **diagnosis.to_json())
    if diagnosis.verdict == "unread":
        raise EvidenceError(f"{path}: {_unread_message(diagnosis)}")
    if not json:
        for line in diagnosis_lines(diagnosis):
            typer.echo(escape_for_terminal(line))
    return 1 if diagnosis.sick else 0


def _unread_message(diagnosis: "ScalarDiagnosis") -> str:
    read = ", ".join(diagnosis.log.written_as.values())
    return " ".join(
        [
            (
                f"is unread. {' '.join(_coverage_lines(diagnosis))}. "
                f"Read: {read}. That does not suffice for a"
            ),
            "diagnosis. Give a log that has one of the missing metrics, under a name",
            "listed in docs/how-to/other-trainers.md.",
        ]
    )


def diagnosis_lines(diagnosis: "ScalarDiagnosis") -> list[str]:
    """Return the lines printed for people."""
    from klinic.doctor.scalars.examine import find_fix
    from klinic.evidence.verdict import Verdict

    log = diagnosis.log
    steps = f"{len(log.steps)} logged steps, {log.steps[0]} to {log.steps[-1]}"
    writer = f"of {log.trainer.name}" if log.trainer.recognised else "(trainer not recognised)"
    output = [
        *_coverage_lines(diagnosis),
        f"{log.format} {writer}, {steps}: {log.files[0]}",
        SCALARS_ONLY,
    ]
    if log.also:
        output.append(f"Present but not read: {', '.join(log.also)}")
    if log.num_skipped:
        output.append(f"{log.num_skipped} values or lines were not numeric and were skipped.")
    failed = diagnosis.with_verdict(Verdict.FAIL)
    output += ["", _headline_text(diagnosis)]
    if diagnosis.cause is not None:
        output.append(f"Fix: {find_fix(diagnosis.cause)}")
    output.append("")
    for sign, finding in sorted(
        diagnosis.findings, key=lambda pair: list(VERDICT_ORDER).index(pair[1].verdict)
    ):
        output.append(f"{finding.verdict.mark} {sign.name}: {finding.summary}")
        if finding.could_be:
            output.append(f"    could be: {', '.join(finding.could_be)}")
    output += ["", f"Would decide {'which' if failed else 'more'}: {', '.join(diagnosis.missing)}"]
    output.append(log.trainer.klinic_records)
    if failed:
        output.append("klinic explain NAME describes a sign or a cause.")
    return output


def _coverage_lines(diagnosis: "ScalarDiagnosis") -> list[str]:
    """Return which metrics were read and which were not; printed first."""
    from klinic.doctor.scalars.examine import CORE_METRICS

    log = diagnosis.log
    read, total = len(log.written_as), len(log.written_as) + len(log.unknown)
    names = diagnosis.not_found or tuple(CORE_METRICS)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    were = "was" if len(names) == 1 else "were"
    was_found = f"{were} {'not found' if diagnosis.not_found else 'found'} in this log"
    output = [f"{listed[0].upper()}{listed[1:]} {was_found}; {read} of {total} metrics were read."]
    if log.unknown:
        likely = sorted(
            log.unknown, key=lambda n: not any(part in n.lower() for part in LIKELY_NAME_PARTS)
        )
        num_more = len(likely) - MAX_NAMED
        rest = f" and {num_more} more" if num_more > 0 else ""
        output.append(f"Not read: {', '.join(name[:80] for name in likely[:MAX_NAMED])}{rest}")
    return output


VERDICT_ORDER = ("fail", "warn", "no data", "pass")


def _headline_text(diagnosis: "ScalarDiagnosis") -> str:
    from klinic.evidence.verdict import Verdict

    failed = diagnosis.with_verdict(Verdict.FAIL)
    if not failed:
        return "No sign of trouble in the metrics read. Other causes stay undecided."
    sign, finding = failed[0]
    if diagnosis.cause is not None:
        return f"Cause: {diagnosis.cause}, first seen in step {finding.step} ({sign.name})"
    return f"Sick: {sign.name}, first seen in step {finding.step}. No cause can be named."
