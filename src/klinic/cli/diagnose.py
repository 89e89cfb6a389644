"""`klinic diagnose RUN`: the root cause of a run with evidence; exit code 1 if a check failed.

Of a scalar log it prints certain findings, possible causes and missing evidence.
"""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from klinic.cli.printing import Json, print_json, require_modules
from klinic.cli.progress import NoCache, findings_cache, show_progress
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.errors import ConfigError, EvidenceError, KlinicError

if TYPE_CHECKING:
    from klinic.doctor.diagnosis import Diagnosis
    from klinic.replay.proof import Proof

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, a bundle, or the log of another trainer.",
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


All = Annotated[
    bool, typer.Option("--all", help="List every cause, also those that are ruled out.")
]


def diagnose(
    run: Run,
    prove: Prove = False,
    every: All = False,
    run_code: RunCode = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Name the root cause of a run, with evidence, ruled-out causes, and the fix."""
    if run_code and not prove:
        raise ConfigError("--run-code needs --prove: diagnosing records runs no code.")
    from klinic.evidence.bundle_head import is_bundle
    from klinic.evidence.schema import refuse_newer

    try:
        refuse_newer(run)
        if is_bundle(run):
            diagnosis = diagnose_bundle(run, prove=prove)
        else:
            diagnosis = diagnose_records(
                run, prove=prove, no_cache=no_cache, json=json, every=every
            )
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

        from klinic.cli.diagnosis_view import print_diagnosis

        console = Console(highlight=False)
        print_diagnosis(diagnosis, console, run=run, every=every, prove=prove, proof=proof)
    raise typer.Exit(1 if diagnosis.sick else 0)


def diagnose_records(
    run: Path, *, prove: bool, no_cache: bool, json: bool, every: bool = False
) -> "Diagnosis":
    """Return the diagnosis of a run's records; a run without records goes to `diagnose_other`."""
    from klinic.evidence.readers.find import has_records

    if not has_records(run):
        diagnose_other(run, prove=prove, json=json, every=every)
    import numpy as np

    from klinic.doctor.run_diagnosis import default_num_workers, diagnose_run

    # records may hold any value, and NumPy's warnings would name klinic's source lines
    with np.errstate(all="ignore"), show_progress("Checking the steps") as progress:
        return diagnose_run(
            run, cache=findings_cache(no_cache), workers=default_num_workers(), progress=progress
        )


def diagnose_bundle(path: Path, *, prove: bool) -> "Diagnosis":
    """Return the diagnosis of a bundle, which is unpacked into a temporary folder."""
    import numpy as np

    from klinic.doctor.run_diagnosis import default_num_workers, diagnose_run
    from klinic.evidence.bundle import unpack_bundle

    if prove:
        raise ConfigError(f"{path} is a bundle: it has no checkpoint to replay. Omit --prove.")
    with (
        unpack_bundle(path) as folder,
        np.errstate(all="ignore"),
        show_progress("Checking the steps") as progress,
    ):
        return diagnose_run(folder, workers=default_num_workers(), progress=progress)


def diagnose_other(run: Path, *, prove: bool, json: bool, every: bool) -> NoReturn:
    """Diagnose another trainer's output: its batch dumps, or else its scalars."""
    from klinic.evidence.readers.dumps.find import find_dumps
    from klinic.evidence.readers.find import find_run

    if not run.exists():
        raise ConfigError(f"{run} does not exist. Give a run folder or a log.")
    if prove:
        raise ConfigError(
            f"{run} has no klinic records, and --prove replays a recorded step. Omit --prove."
        )
    run = find_run(run)
    sources = find_dumps(run)
    if not sources:
        raise typer.Exit(diagnose_scalars(run, json=json, every=every))
    from klinic.cli.diagnose_dump import diagnose_dumps

    raise typer.Exit(diagnose_dumps(run, sources, json=json, every=every))


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

        proof = prove_cause(run, diagnosis.cause, diagnosis.first_step, run_code=run_code)
    if proof is not None:
        _store_proof(run, proof)
    return proof


def _store_proof(run: Path, proof: "Proof") -> None:
    """Write the proof into the run folder for its report; skip it where that is not allowed."""
    from klinic.evidence.files import json_bytes
    from klinic.evidence.run_facts import PROOF
    from klinic.evidence.writing import write_atomically

    with suppress(OSError, EvidenceError, ValueError):
        write_atomically(run / PROOF, json_bytes(asdict(proof)) + b"\n")


def _announce_run_code(run: Path, *, run_code: bool) -> None:
    """Print which code of the run a replay executes or skips."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.recipe.recorded import load_recorded

    if (run / RECIPE).is_file():
        recorded = load_recorded(run / RECIPE, run_code=run_code)
        announce_code(recorded.allowed, recorded.refused)


def diagnose_scalars(path: Path, *, json: bool, every: bool = False) -> int:
    """Print the diagnosis of a log; return 1 if a sign failed, raise if the log is unread."""
    from rich.console import Console

    from klinic.cli.log_view import print_log_diagnosis, unread_message
    from klinic.doctor.scalars.examine import examine_log
    from klinic.evidence.readers.find import read_log
    from klinic.evidence.verdict import RunVerdict

    diagnosis = examine_log(read_log(path))
    if json:
        is_well = diagnosis.verdict is RunVerdict.NONE
        print_json("diagnose", ok=is_well, **diagnosis.to_json())
    if diagnosis.verdict is RunVerdict.UNREAD:
        raise EvidenceError(f"{path}: {unread_message(diagnosis)}")
    if not json:
        print_log_diagnosis(diagnosis, Console(highlight=False), every=every)
    return 1 if diagnosis.sick else 0
