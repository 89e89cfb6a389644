"""Chooses the run in a folder of several, and says so."""

from pathlib import Path

import typer

from klinic.runtime.terminal_text import escape_for_terminal


def choose_run(path: Path) -> Path:
    """Return a path, or the newest run in a folder of runs with a line about it on stderr."""
    from klinic.evidence.readers.run_folders import find_run

    found = find_run(path)
    if found.notice:
        typer.echo(escape_for_terminal(found.notice), err=True)
    return found.path
