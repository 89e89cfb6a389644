"""`klinic diagnose RUN`: the root cause of a run with evidence; exit code 1 if a check failed.

Of a scalar log it prints certain findings, possible causes and missing evidence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.chosen_run import choose_run
from klinic.cli.fetched_run import fetch_if_url
from klinic.cli.metric_option import Metric, given_names, refuse_names
from klinic.cli.plain_text import echo_text
from klinic.cli.printing import Json, print_json
from klinic.cli.progress import NoCache, findings_cache, show_progress
from klinic.cli.proof import OF_OTHERS, attempt_proof
from klinic.cli.recorded_code import RunCode
from klinic.errors import ConfigError, EvidenceError, KlinicError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from klinic.doctor.diagnosis import Diagnosis

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder or its URL, a bundle, or the log of another trainer.",
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


def diagnose(  # noqa: PLR0913, PLR0917 - options of a command line
    run: Run,
    prove: Prove = False,
    every: All = False,
    metric: Metric = None,
    run_code: RunCode = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Name the root cause of a run, with evidence, ruled-out causes, and the fix."""
    if run_code and not prove:
        raise ConfigError("--run-code needs --prove: diagnosing records runs no code.")
    run = fetch_if_url(run, whole=prove)
    with unreadable_as_evidence(run):
        if not is_klinic_run(run):
            code = diagnose_other(run, given_names(metric), json=json, every=every)
            if prove and not json:
                echo_text(f"\nProof: not possible: {OF_OTHERS}")
            raise typer.Exit(code)
        refuse_names(run, metric)
        diagnosis = read_diagnosis(run, no_cache=no_cache)
    attempt = attempt_proof(run, diagnosis, run_code=run_code) if prove else None
    if json:
        print_diagnosis_json(diagnosis, **(attempt.to_json() if attempt else {}))
    else:
        from rich.console import Console

        from klinic.cli.diagnosis_view import print_diagnosis

        console = Console(highlight=False)
        print_diagnosis(diagnosis, console, run=run, every=every, attempt=attempt)
    raise typer.Exit(1 if diagnosis.sick else 0)


@contextmanager
def unreadable_as_evidence(run: Path) -> Iterator[None]:
    """Raise an `OSError` of reading a run as an error that says what to do."""
    try:
        yield
    except KlinicError:  # some are also an OSError
        raise
    except OSError as error:
        from klinic.evidence.files import unreadable_error

        raise unreadable_error(Path(error.filename or run), error) from error


def is_klinic_run(run: Path) -> bool:
    """Whether a path is a bundle or a folder with klinic's records; raise for a newer format."""
    from klinic.evidence.bundle_head import is_bundle
    from klinic.evidence.readers.find import has_records
    from klinic.evidence.schema import refuse_newer

    refuse_newer(run)
    return is_bundle(run) or has_records(run)


def read_diagnosis(run: Path, *, no_cache: bool) -> "Diagnosis":
    """Return the diagnosis of a bundle or of a run's records."""
    from klinic.evidence.bundle_head import is_bundle

    return diagnose_bundle(run) if is_bundle(run) else diagnose_records(run, no_cache=no_cache)


def diagnose_records(run: Path, *, no_cache: bool) -> "Diagnosis":
    """Return the diagnosis of a run's records."""
    import numpy as np

    from klinic.doctor.run_diagnosis import default_num_workers, diagnose_run

    # records may hold any value, and NumPy's warnings would name klinic's source lines
    with np.errstate(all="ignore"), show_progress("Checking the steps") as progress:
        return diagnose_run(
            run, cache=findings_cache(no_cache), workers=default_num_workers(), progress=progress
        )


def diagnose_bundle(path: Path) -> "Diagnosis":
    """Return the diagnosis of a bundle, which is unpacked into a temporary folder."""
    import numpy as np

    from klinic.doctor.run_diagnosis import default_num_workers, diagnose_run
    from klinic.evidence.bundle import unpack_bundle

    with (
        unpack_bundle(path) as folder,
        np.errstate(all="ignore"),
        show_progress("Checking the steps") as progress,
    ):
        return diagnose_run(folder, workers=default_num_workers(), progress=progress)


def diagnose_other(run: Path, names: "Mapping[str, str]", *, json: bool, every: bool) -> int:
    """Diagnose another trainer's output, its batch dumps or else its scalars; return the exit code.

    `names` maps metrics to their names in the log.
    """
    from klinic.evidence.readers.dumps.find import find_dumps

    if not run.exists():
        raise ConfigError(f"{run} does not exist. Give a run folder or a log.")
    run = choose_run(run)
    sources = find_dumps(run)
    if not sources:
        return diagnose_scalars(run, names, json=json, every=every)
    from klinic.cli.diagnose_dump import diagnose_dumps

    return diagnose_dumps(run, sources, names, json=json, every=every)


def print_diagnosis_json(diagnosis: "Diagnosis", **extra: object) -> None:
    """Print a diagnosis of records as JSON."""
    content = {"evidence": "records", **diagnosis.to_json(), **extra}
    print_json("diagnose", ok=not diagnosis.sick, **content)


def diagnose_scalars(
    path: Path, names: "Mapping[str, str]", *, json: bool, every: bool = False
) -> int:
    """Print the diagnosis of a log; return 1 if a sign failed, raise if the log is unread."""
    from rich.console import Console

    from klinic.cli.log_view import print_log_diagnosis, unread_message
    from klinic.doctor.scalars.examine import examine_log
    from klinic.evidence.readers.find import read_log
    from klinic.evidence.readers.run_folders import join_parts
    from klinic.evidence.verdict import RunVerdict

    diagnosis = examine_log(join_parts(read_log(path, names), path))
    if json:
        is_well = diagnosis.verdict is RunVerdict.NONE
        print_json("diagnose", ok=is_well, **diagnosis.to_json())
    if diagnosis.verdict is RunVerdict.UNREAD:
        raise EvidenceError(f"{path}: {unread_message(diagnosis)}")
    if not json:
        print_log_diagnosis(diagnosis, Console(highlight=False), every=every)
    return 1 if diagnosis.sick else 0
