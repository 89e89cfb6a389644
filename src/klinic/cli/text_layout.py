"""Text for people: wrapped between words on a terminal, one line per item elsewhere.

Untrusted text is escaped here. Colours are rich's, which leaves them out for NO_COLOR and in pipes.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from klinic.runtime.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from rich.console import Console

MAX_WIDTH = 110  # columns; longer lines are hard to read
MIN_ROOM = 24  # columns of text; a narrower terminal breaks lines itself


def print_text(
    console: "Console",
    text: str,
    *,
    label: str = "",
    style: str = "",
    label_style: str = "bold",
    indent: tuple[int, int] = (0, 2),
) -> None:
    """Print a label and a text; `indent` is that of the first and of the further lines."""
    from rich.text import Text

    styled = Text(escape_for_terminal(label), style=label_style)
    styled = Text().append(styled).append(escape_for_terminal(text), style=style)
    room = min(console.width, MAX_WIDTH) - max(indent)
    if not console.is_terminal or room < MIN_ROOM:
        console.print(Text(" " * indent[0]).append(styled), soft_wrap=True)
        return
    for number, line in enumerate(styled.wrap(console, room)):
        line.rstrip()
        pad = Text(" " * indent[min(number, 1)])
        console.print(pad.append(line), no_wrap=True, crop=False, overflow="ignore")


def print_title(console: "Console", title: str) -> None:
    """Print an empty line and the title of a section."""
    from rich.text import Text

    console.print(Text(f"\n{title}", style="bold"))


def print_numbered(console: "Console", items: Iterable[str]) -> None:
    """Print a numbered list."""
    for number, item in enumerate(items, start=1):
        print_text(console, item, label=f"{number}. ", label_style="", indent=(2, 5))


def print_commands(
    console: "Console", *commands: tuple[str, str], title: str = "Next:", style: str = "cyan"
) -> None:
    """Print commands with their purpose: to the right where all fit, else below."""
    from rich.text import Text

    print_title(console, title)
    column = 2 + max(len(command) for command, _ in commands) + 2
    fits = not console.is_terminal or all(column + len(why) < console.width for _, why in commands)
    for command, why in commands:
        shown = escape_for_terminal(command)
        line = Text("  ").append(shown, style=style)
        if fits:
            line.append(" " * (column - 2 - len(shown)) + why)
        console.print(line, soft_wrap=True)
        if not fits:
            print_text(console, why, indent=(6, 6))
