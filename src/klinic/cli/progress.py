"""Progress bar and findings cache of commands that check the steps of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from klinic.doctor.findings_cache import FindingsCache
    from klinic.doctor.run_diagnosis import Progress

NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache", help="Check every step again: neither read nor write the findings cache."
    ),
]


def findings_cache(no_cache: bool) -> "FindingsCache | None":
    """Return the user's findings cache; None if it is disabled."""
    from klinic.doctor.findings_cache import open_cache

    return None if no_cache else open_cache()


@contextmanager
def show_progress(words: str) -> Iterator["Progress"]:
    """Show a progress bar on a terminal; yield a callback that takes done and total."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(words, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
