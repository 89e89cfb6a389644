"""`klinic report RUN [RUN2]`: write a run as one HTML file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.chosen_run import choose_run
from klinic.cli.fetched_run import fetch_if_url
from klinic.cli.metric_option import Metric, given_names, refuse_names
from klinic.cli.printing import print_line
from klinic.cli.progress import NoCache, findings_cache, show_progress
from klinic.errors import ConfigError
from klinic.evidence.remote.url import url_of_path
from klinic.evidence.writing import refuse_special, write_atomically
from klinic.runtime.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from klinic.report.reading import RunReport

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN [RUN2]",
        help="A run folder or its URL, a bundle, the log of another trainer; two to compare.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The file to write.", show_default="RUN/report.html"),
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
    metric: Metric = None,
    no_cache: NoCache = False,
) -> None:
    """Write one HTML file: diagnosis, curves, log-prob gaps, and the KL of every token."""
    page = out or _default_page(runs[0])
    if not terminal:
        refuse_special(page)  # before the slow read of the records
    from rich.console import Console

    from klinic.doctor.run_diagnosis import default_num_workers
    from klinic.evidence.schema import refuse_newer

    if len(runs) > 2:
        raise ConfigError(f"{len(runs)} runs are given, but a page compares at most two.")
    runs = [fetch_if_url(run) for run in runs]
    for run in runs:
        if not run.exists():
            raise ConfigError(f"{run} does not exist. Give a run folder or a log.")
        refuse_newer(run)
    console = Console(highlight=False)
    options: dict[str, Any] = {"cache": findings_cache(no_cache), "workers": default_num_workers()}
    with show_progress("Checking the steps") as progress:
        stories = [read_any_report(run, metric, **options, progress=progress) for run in runs]
    for story in stories:
        print_line(console, escape_for_terminal(f"{story.name}: {story.sentence}"))
        if terminal and story.heat:
            from klinic.report.terminal import print_run_report

            print_run_report(story, console, step)
    if not terminal:
        print_line(console, f"Report: {write_page(stories, page)}")


def read_any_report(run: Path, metric: list[str] | None = None, **options: Any) -> "RunReport":
    """Return the report of a run folder with records, of a bundle, or else of a scalar log."""
    from dataclasses import replace

    from klinic.evidence.bundle import unpack_bundle
    from klinic.evidence.bundle_head import is_bundle
    from klinic.evidence.readers.dumps.find import find_dumps
    from klinic.evidence.readers.find import has_records
    from klinic.report.log_reading import read_log_report
    from klinic.report.reading import read_run_report

    if has_records(run):
        refuse_names(run, metric)
        return read_run_report(run, **options)
    if is_bundle(run):
        refuse_names(run, metric)
        with unpack_bundle(run) as folder:
            story = read_run_report(folder, **{**options, "cache": None})
        return replace(story, name=str(run))
    run = choose_run(run)
    if find_dumps(run):
        raise ConfigError(
            f"{run}: is a dump of another trainer. Write it in klinic's format first: klinic "
            f"convert {run} OUT, and then: klinic report OUT."
        )
    return read_log_report(run, given_names(metric))


def _default_page(run: Path) -> Path:
    """Return where the page is written: into a folder, beside a log, or here for a URL."""
    if url_of_path(run) is not None:
        return Path(f"{run.name}.html")
    return run / "report.html" if run.is_dir() else run.with_name(f"{run.name}.html")


def write_page(stories: "list[RunReport]", path: Path) -> Path:
    """Write the page of one or two runs; return its path."""
    from klinic.report.page import render

    path.parent.mkdir(parents=True, exist_ok=True)
    # tokens may decode to lone surrogates
    write_atomically(path, render(stories).encode("utf-8", "backslashreplace"))
    return path
