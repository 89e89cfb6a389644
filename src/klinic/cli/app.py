"""The `klinic` command, its errors and its exit codes.

Exit codes: 0 well, 1 a finding that fails, 2 the input cannot be used, 3 klinic itself is at fault,
75 a process of the run is gone and it can go on with --resume, 128 + n stopped by signal n.
"""

import os
import sys
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
from klinic.cli.report import report
from klinic.cli.train import FLAGS, train
from klinic.cli.verify import verify
from klinic.cli.watch import watch
from klinic.errors import KlinicError
from klinic.harmless import harmless

KEPT = "\n\t"  # what messages are laid out with

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
    """Run a command; say in one sentence what cannot be used."""
    try:
        app()
    except KlinicError as error:
        typer.echo(harmless(f"{type(error).__name__}: {error}", keep=KEPT), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # where typer's own net does not reach
        sys.exit(130)
    except Exception as error:
        if "KLINIC_DEBUG" in os.environ:
            raise
        typer.echo(
            harmless(f"{type(error).__name__}: {error}", keep=KEPT)
            + "\nThis is a mistake in klinic, not in what you gave it. KLINIC_DEBUG=1 shows where.",
            err=True,
        )
        sys.exit(3)
