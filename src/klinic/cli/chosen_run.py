"""Chooses the run in a folder of several, and says so."""

from pathlib import Path

from klinic.cli.plain_text import echo_text


def choose_run(path: Path) -> Path:
    """Return a path, or the newest run in a folder of runs with a line about it on stderr."""
    from klinic.evidence.readers.run_folders import find_run

    found = find_run(path)
    if found.notice:
        echo_text(found.notice, err=True)
    return found.path
