"""`klinic report RUN [RUN2]`: a run as one HTML file, to look at and to send around."""

from pathlib import Path
from typing import Annotated

import typer

from klinic.cli.extras import require
from klinic.cli.printing import say
from klinic.errors import ConfigError

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN [RUN2]", help="The folder of a run, or of two to compare.", show_default=False
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="The file to write.", show_default="RUN/report.html")
]


def report(runs: Runs, out: Out = None) -> None:
    """Write one HTML file: diagnosis, curves, log-prob gaps, and the KL of every token."""
    require("plot", "matplotlib")
    from rich.console import Console

    from klinic.report.page import render
    from klinic.report.reading import read_story

    if len(runs) > 2:
        raise ConfigError(f"{len(runs)} runs are given, and a page has room for two.")
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"{run} is no folder. Give the folder of a run: runs/arithmetic.")
    console = Console(highlight=False)
    with Console(stderr=True).status("Reading the records ..."):
        stories = [read_story(run) for run in runs]
        text = render(stories)
    path = out or runs[0] / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    for story in stories:
        say(console, f"{story.name}: {story.diagnosis.sentence}")
    say(console, f"Report: {path}")
