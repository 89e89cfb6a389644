"""Messages without rich, whose import takes long: wrapped between words on a terminal."""

import shutil
import sys
import textwrap

import typer

from klinic.runtime.terminal_text import escape_for_terminal

MAX_WIDTH, MIN_WIDTH = 110, 40
ALLOWED_WHITESPACE = "\n\t"


def echo_text(text: str, *, err: bool = False, hang: int = 0) -> None:
    """Print untrusted text; `hang` is the indent of further lines. A pipe gets it unwrapped."""
    stream = sys.stderr if err else sys.stdout
    shown = escape_for_terminal(text, keep=ALLOWED_WHITESPACE)
    if stream is not None and stream.isatty():
        shown = wrap_words(shown, hang=hang)
    typer.echo(shown, err=err)


def wrap_words(text: str, *, hang: int = 0, taken: int = 0) -> str:
    """Wrap each line to the terminal between words; `taken` columns of the first are not free."""
    columns = shutil.get_terminal_size().columns - 1
    if columns < MIN_WIDTH:  # a narrow terminal breaks lines itself
        return text
    lines = []
    for number, line in enumerate(text.split("\n")):
        indent = len(line) - len(line.lstrip(" "))
        wrapped = textwrap.wrap(
            line.strip(" "),
            min(columns, MAX_WIDTH),
            initial_indent=" " * (indent + (0 if number else taken)),
            subsequent_indent=" " * (indent + hang),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += wrapped or [line]
    return "\n".join(lines)[taken:]
