"""The `klinic` command, its errors and its exit codes.

Exit codes: 0 success, 1 a failing finding, 2 unusable input, 3 a bug in klinic, 4 a machine fault,
75 a process of the run was lost and --resume can continue it, 128 + n stopped by signal n.
docs/reference/commands.md has the table.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer

from klinic import __version__
from klinic.cli.ablate import ablate
from klinic.cli.bundle import bundle
from klinic.cli.check import check
from klinic.cli.convert import convert
from klinic.cli.demo import demo
from klinic.cli.diagnose import diagnose
from klinic.cli.eval import evaluate
from klinic.cli.explain import explain
from klinic.cli.export import export
from klinic.cli.help_page import HelpCommand, HelpGroup
from klinic.cli.output import ignore_broken_pipes, ignore_write_errors
from klinic.cli.plain_text import echo_text
from klinic.cli.process_exit import exit_despite_threads
from klinic.cli.report import report
from klinic.cli.train import FLAGS, train
from klinic.cli.verify import verify
from klinic.cli.watch import watch
from klinic.errors import KlinicError, error_text
from klinic.runtime.interrupts import remember_interrupts
from klinic.runtime.machine_faults import as_machine_error

DESCRIPTION = (
    "Train language models with GRPO, tie them to a reference by a KL term that is proven right, "
    "and name the cause when a run goes wrong."
)

app = typer.Typer(
    name="klinic",
    cls=HelpGroup,
    help=DESCRIPTION,
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
    """Show the version or the help; the help of the app is `DESCRIPTION`."""


def _register(group: str, function: Callable[..., None], name: str = "", **options: Any) -> None:
    """Register a command in a group of the help."""
    app.command(name=name or function.__name__, cls=HelpCommand, rich_help_panel=group, **options)(
        function
    )


_register("Train", train, context_settings=FLAGS)
_register("Train", evaluate, "eval")
_register("Train", ablate, context_settings=FLAGS)
_register("Train", export)
_register("Check", check, context_settings=FLAGS)
_register("Check", verify)
_register("Check", diagnose)
_register("Check", explain)
_register("Look", convert)
_register("Look", report)
_register("Look", bundle)
_register("Look", watch)
_register("Look", demo, context_settings=FLAGS)


def main() -> None:
    """Run a command; print an error as one sentence and exit with its code."""
    if sys.argv[1:2] != ["watch"]:  # its output is its only purpose
        ignore_broken_pipes()
    remember_interrupts()
    code = _run_safely()
    ignore_write_errors()  # otherwise Python's final flush could change the exit code
    exit_despite_threads(code)
    sys.exit(code)


def _run_safely() -> int:
    try:
        return _run_command()
    except KlinicError as error:
        return _print_error(f"{type(error).__name__}: {error}", error.exit_code)
    except KeyboardInterrupt:  # raised outside typer's own handler
        return 130
    except BaseException as error:  # user code may raise a non-Exception
        if "KLINIC_DEBUG" in os.environ:
            raise
        fault = as_machine_error(error)
        if fault is not None:
            return _print_error(f"{type(fault).__name__}: {fault}", fault.exit_code)
        return _print_error(
            f"Internal error (a bug in klinic): {type(error).__name__}: {error_text(error)}\n"
            "Your input is not the cause. Set KLINIC_DEBUG=1 for the traceback.",
            3,
        )


def _run_command() -> int:
    try:
        app()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            return _print_error(ended.code, 1)
        with suppress(ValueError, AttributeError):  # closed or missing stream
            sys.stdout.flush()  # now: unwritten output is a failure
        return ended.code or 0
    return 0


def _print_error(sentence: str, exit_code: int) -> int:
    with suppress(OSError):  # standard error may be closed, or its disk full
        echo_text(sentence, err=True)
    return exit_code
