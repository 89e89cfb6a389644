"""`klinic diagnose RUN`: the root cause of a run with evidence; exit code 1 if a check failed."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from klinic.cli.extras import require
from klinic.cli.printing import Json, print_json, say
from klinic.cli.progress import NoCache, findings_cache, show_progress
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.errors import ConfigError, KlinicError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from klinic.checks.base import Case
    from klinic.doctor.diagnosis import Diagnosis
    from klinic.probe.proof import Proof

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
        found = found_in(run, prove=prove, no_cache=no_cache, json=json)
    except KlinicError:  # some are also an OSError
        raise
    except OSError as error:
        from klinic.evidence.files import unreadable

        raise unreadable(Path(error.filename or run), error) from error
    proof = proof_of(run, found, run_code=run_code) if prove else None
    if json:
        proved = {} if not prove else {"proof": None if proof is None else asdict(proof)}
        print_found(found, **proved)
    else:
        from rich.console import Console

        _print(found, Console(highlight=False))
        if prove:
            print_proof(found, proof, Console(highlight=False))
    raise typer.Exit(1 if found.sick else 0)


def found_in(run: Path, *, prove: bool, no_cache: bool, json: bool) -> "Diagnosis":
    """Return the diagnosis of a run's records; a run without records goes to `diagnose_other`."""
    from klinic.evidence.readers.find import has_records

    if not has_records(run):
        diagnose_other(run, prove=prove, json=json)
    import numpy as np

    from klinic.doctor.examining import diagnose_run, workers_here

    # records may hold any value, and NumPy's warnings would name klinic's source lines
    with np.errstate(all="ignore"), show_progress("Judging the steps") as progress:
        return diagnose_run(
            run, cache=findings_cache(no_cache), workers=workers_here(), progress=progress
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
    tokens = prime_rl_files.find(run)
    if tokens is None:
        from klinic.cli.scalars import diagnose_scalars

        raise typer.Exit(diagnose_scalars(run, json=json))
    from klinic.doctor.reading import foreign_cases

    found = judged(foreign_cases(tokens))
    if json:
        print_found(found, read={"format": "prime-rl token export", "files": [str(tokens)]})
    else:
        from rich.console import Console

        typer.echo(f"Token export of prime-rl, {tokens}: no rewards, no reference.\n")
        _print(found, Console(highlight=False))
    raise typer.Exit(1 if found.sick else 0)


def judged(cases: "Iterator[Case]") -> "Diagnosis":
    """Apply every check to every case."""
    import numpy as np
    from rich.console import Console

    from klinic.checks import CHECKS
    from klinic.doctor.diagnosis import diagnose as judge

    with np.errstate(all="ignore"), Console(stderr=True).status("Reading the records ..."):
        return judge(cases, CHECKS)


def print_found(found: "Diagnosis", **more: object) -> None:
    """Print a diagnosis of records as JSON."""
    content = {"evidence": "records", **found.to_json(), **more}
    print_json("diagnose", ok=not found.sick, **content)


def proof_of(run: Path, found: "Diagnosis", *, run_code: bool) -> "Proof | None":
    """Replay the first step that shows the cause; None without a cause."""
    from rich.console import Console

    if found.cause is None or found.first_step is None:
        return None
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    _announce(run, run_code=run_code)
    with Console(stderr=True).status(f"Replaying step {found.first_step} ..."):
        from klinic.probe.proof import prove

        return prove(run, found.cause, found.first_step, run_code=run_code)


def _announce(run: Path, *, run_code: bool) -> None:
    """Print which code of the run a replay executes or skips."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.recipe.recorded import load_recorded

    if (run / RECIPE).is_file():
        recorded = load_recorded(run / RECIPE, run_code=run_code)
        announce_code(recorded.allowed, recorded.refused)


def print_proof(found: "Diagnosis", proof: "Proof | None", console: "Console") -> None:
    """Print the result of replaying the blamed step."""
    if found.cause is None:
        return
    if proof is None:
        said = "not possible: no single change in a replay of this run would show this cause."
    else:
        said = (
            f"{'confirmed' if proof.confirmed else 'not confirmed'}. Step {proof.step} replayed, "
            f"changed: {proof.changed}.\n  {proof.quantity}: {proof.before:.4g} before, "
            f"{proof.after:.4g} after"
        )
    say(console, f"\nProof: {said}")


def print_cause(found: "Diagnosis", console: "Console") -> None:
    """Print the cause and its fix."""
    if found.cause is None:
        say(console, found.nothing)
        return
    say(console, f"Cause: {found.cause}, first seen in step {found.first_step}")
    say(console, f"Fix: {found.fix}")
    for key, value in found.change.items():
        say(console, f"  {key}: {value}")


def _print(found: "Diagnosis", console: "Console") -> None:
    print_cause(found, console)
    say(console)
    for hypothesis in sorted(found.hypotheses, key=lambda h: h.check.stage):
        summary = "" if hypothesis.finding is None else hypothesis.finding.summary
        say(console, f"{hypothesis.status.mark} {hypothesis.check.name}: {summary}")
    if found.missing:
        say(console, f"\nNot recorded, and would decide more: {', '.join(found.missing)}")
    if found.cause is not None:
        say(console, f"\nklinic explain {found.cause} describes the check.")
