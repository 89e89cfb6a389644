"""The `klinic` command, its errors and its exit codes.

Exit codes: 0 success, 1 a failing finding, 2 unusable input, 3 a bug in klinic, 4 a machine fault,
75 a process of the run was lost and --resume can continue it, 128 + n stopped by signal n.
docs/reference/commands.md has the table.
"""

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from klinic import __version__
from klinic.cli.ablate import ablate
from klinic.cli.check import check
from klinic.cli.demo import demo
from klinic.cli.diagnose import diagnose
from klinic.cli.eval import evaluate
from klinic.cli.explain import explain
from klinic.cli.export import export
from klinic.cli.leaving import leave_without_threads
from klinic.cli.output import outlive_output, outlive_readers
from klinic.cli.report import report
from klinic.cli.train import FLAGS, train
from klinic.cli.verify import verify
from klinic.cli.watch import watch
from klinic.errors import KlinicError, text_of
from klinic.harmless import harmless
from klinic.machine_faults import machine_fault

KEPT = "\n\t"  # whitespace allowed in messages

app = typer.Typer(
    name="klinic",
    help="GRPO with a KL term that is proven right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"klinic {__version__}")
        raise typer.Exit


@app.callback()
def klinic(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """GRPO with a KL term that is proven right."""


app.command(rich_help_panel="Train", context_settings=FLAGS)(train)
app.command(name="eval", rich_help_panel="Train")(evaluate)
app.command(rich_help_panel="Train", context_settings=FLAGS)(ablate)
app.command(rich_help_panel="Train")(export)
app.command(rich_help_panel="Check", context_settings=FLAGS)(check)
app.command(rich_help_panel="Check")(verify)
app.command(rich_help_panel="Check")(diagnose)
app.command(rich_help_panel="Check")(explain)
app.command(rich_help_panel="Look")(report)
app.command(rich_help_panel="Look")(watch)
app.command(rich_help_panel="Look", context_settings=FLAGS)(demo)


def main() -> None:
    """Run a command; print an error as one sentence and exit with its code."""
    if sys.argv[1:2] != ["watch"]:  # its output is its only purpose
        outlive_readers()
    code = _run()
    outlive_output()  # otherwise Python's final flush could change the exit code
    leave_without_threads(code)
    sys.exit(code)


def _run() -> int:
    try:
        return _run_command()
    except KlinicError as error:
        return _fail(f"{type(error).__name__}: {error}", error.exit_code)
    except KeyboardInterrupt:  # raised outside typer's own handler
        return 130
    except BaseException as error:  # user code may raise a non-Exception
        if "KLINIC_DEBUG" in os.environ:
            raise
        fault = machine_fault(error)
        if fault is not None:
            return _fail(f"{type(fault).__name__}: {fault}", fault.exit_code)
        return _fail(
            f"Internal error (a bug in klinic): {type(error).__name__}: {text_of(error)}\n"
            "Your input is not the cause. Set KLINIC_DEBUG=1 for the traceback.",
            3,
        )


def _run_command() -> int:
    try:
        app()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            return _fail(ended.code, 1)
        with suppress(ValueError, AttributeError):  # closed or missing stream
            sys.stdout.flush()  # now: unwritten output is a failure
        return ended.code or 0
    return 0


def _fail(sentence: str, exit_code: int) -> int:
    with suppress(OSError):  # standard error may be closed, or its disk full
        typer.echo(harmless(sentence, keep=KEPT), err=True)
    return exit_code
