"""`klinic report RUN [RUN2]`: write a run as one HTML file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.printing import print_line, require_modules
from klinic.cli.progress import NoCache, findings_cache, show_progress
from klinic.errors import ConfigError
from klinic.evidence.writing import refuse_special, write_atomically
from klinic.runtime.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from klinic.report.reading import RunReport

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN [RUN2]", help="A run folder, or two to compare.", show_default=False
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="The file to write.", show_default="RUN/report.html")
]


Terminal = Annotated[
    bool, typer.Option("--terminal", help="Print gaps and heat map here instead of a file.")
]
Step = Annotated[
    int | None, typer.Option(min=1, help="With --terminal: the step to show; default: the last.")
]


def report(
    runs: Runs,
    out: Out = None,
    terminal: Terminal = False,
    step: Step = None,
    no_cache: NoCache = False,
) -> None:
    """Write one HTML file: diagnosis, curves, log-prob gaps, and the KL of every token."""
    page = out or runs[0] / "report.html"
    if not terminal:
        require_modules("plot", "matplotlib")
        refuse_special(page)  # before the slow read of the records
    from rich.console import Console

    from klinic.doctor.run_diagnosis import default_num_workers
    from klinic.evidence.schema import refuse_newer
    from klinic.report.reading import read_run_report

    if len(runs) > 2:
        raise ConfigError(f"{len(runs)} runs are given, but a page compares at most two.")
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"{run} is not a folder. Give a run folder: runs/arithmetic.")
        refuse_newer(run)
    console = Console(highlight=False)
    options: dict[str, Any] = {"cache": findings_cache(no_cache), "workers": default_num_workers()}
    with show_progress("Checking the steps") as progress:
        stories = [read_run_report(run, **options, progress=progress) for run in runs]
    for story in stories:
        print_line(console, escape_for_terminal(f"{story.name}: {story.diagnosis.sentence}"))
        if terminal:
            from klinic.report.terminal import print_run_report

            print_run_report(story, console, step)
    if not terminal:
        print_line(console, f"Report: {write_page(stories, page)}")


def write_page(stories: "list[RunReport]", path: Path) -> Path:
    """Write the page of one or two runs; return its path."""
    from klinic.report.page import render

    path.parent.mkdir(parents=True, exist_ok=True)
    # tokens may decode to lone surrogates
    write_atomically(path, render(stories).encode("utf-8", "backslashreplace"))
    return path
