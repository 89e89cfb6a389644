"""Draw a terminal with a command: `python docs/terminal_picture.py FILE.svg COMMAND ...`.

The command runs in tmux, which must be installed; its last screen, colours included, becomes an SVG
by rich. Text stays text, and nothing is fetched: the fonts are those of the reader.
"""

import io
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS, ROWS = 100, 60
SECONDS = 600
DONE = "klinic-picture-done"
BACKGROUND, FOREGROUND = (22, 27, 34), (230, 237, 243)
NORMAL = """
    72,79,88 255,123,114 86,211,100 227,179,65 121,192,255 210,168,255 86,212,221 230,237,243
"""
BRIGHT = """
    110,118,129 255,161,152 126,231,135 240,196,90 165,214,255 226,197,255 179,240,255 255,255,255
"""
FORMAT = """\
<svg role="img" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect fill="#161b22" stroke="#30363d" x="1" y="1" width="{width}" height="{height}" rx="8" />
<g transform="translate(26, 22)" fill="#6e7681">
<circle cx="0" cy="0" r="7" /><circle cx="22" cy="0" r="7" /><circle cx="44" cy="0" r="7" />
</g>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def colours(numbers: str) -> list[tuple[int, int, int]]:
    """Return the eight colours of a terminal."""
    return [tuple(map(int, colour.split(","))) for colour in numbers.split()]


def tmux(*words: str) -> str:
    """Run a command of a tmux server of its own."""
    program = shutil.which("tmux")
    if program is None:
        sys.exit("this needs tmux. Install it with your system's package manager.")
    done = subprocess.run(  # noqa: S603 - the arguments are those of this file
        [program, "-L", DONE, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def capture(command: str) -> str:
    """Return the screen after a command, with escape sequences of its colours."""
    shell = f"clear; {command}; tmux -L {DONE} set -g @done yes; sleep {SECONDS}"
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    settings = "TERM=xterm-256color COLORTERM=truecolor"
    tmux("new-session", "-d", *size, f"env {settings} bash --norc -c {shlex.quote(shell)}")
    try:
        limit = time.monotonic() + SECONDS
        while "yes" not in tmux("show", "-g"):
            if time.monotonic() > limit:
                sys.exit(f"{command} takes more than {SECONDS} s")
            time.sleep(0.5)
        return tmux("capture-pane", "-e", "-p")
    finally:
        tmux("kill-server")


def draw(command: str, screen: str) -> str:
    """Return the picture of a command and its screen."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi(screen.rstrip()), soft_wrap=True)
    theme = TerminalTheme(BACKGROUND, FOREGROUND, colours(NORMAL), colours(BRIGHT))
    return console.export_svg(theme=theme, code_format=FORMAT, unique_id="klinic")


if __name__ == "__main__":
    command = shlex.join(sys.argv[2:])
    Path(sys.argv[1]).write_text(draw(command, capture(command)))
