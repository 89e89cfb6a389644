"""The table of what each command may do lists every command."""

import re
from pathlib import Path

from klinic.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"


def rows():
    """Return the cells of the table of commands."""
    section = PAGE.read_text().partition("## Every command")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_command_is_in_the_table_and_no_other():
    named = {re.match(r"`([\w-]+)", cells[0])[1] for cells in rows()}
    registered = {c.name or c.callback.__name__ for c in app.registered_commands}
    assert named == registered


def test_every_row_says_what_may_run_be_written_and_be_opened():
    assert [cells for cells in rows() if len(cells) != 4 or not all(cells)] == []


def test_flags_of_the_table_are_flags_of_their_command():
    import typer

    commands = typer.main.get_command(app).commands
    for cells in rows():
        name, *flags = cells[0].strip("`").split()
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(flags) <= options, cells[0]
        for flag in re.findall(r"`(--[\w-]+)", " ".join(cells[1:])):
            assert flag in options, (cells[0], flag)
