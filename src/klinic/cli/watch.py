"""`klinic watch RUN`: a run as it goes, in a terminal, in a pipe, or in a browser."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from klinic.cli.extras import require
from klinic.cli.keyboard import keyboard
from klinic.cli.printing import say
from klinic.errors import ConfigError
from klinic.harmless import harmless

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.report.live import Follower, Phase, Sight

EVERY = 0.5  # seconds between two looks
LEAVE = ("q", "Q")
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The folder of a run; it may not be there yet.", show_default=False
    ),
]
Web = Annotated[
    bool, typer.Option("--web", help="Serve the report here, for a browser of this machine.")
]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="With --web.", show_default="any that is free")
]


def watch(run: Run, web: Web = False, port: Port = None) -> None:
    """Show a run while it goes: numbers, log-prob gaps, the newest tokens, what happened."""
    from rich.console import Console

    from klinic.evidence.schema import refuse_newer

    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is no folder. Give the folder of a run: runs/arithmetic.")
    refuse_newer(run)
    if port is not None and not web:
        raise ConfigError("--port is for --web: a terminal needs none.")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # shades, where only ASCII can be written
    if web:
        _serve(run, port or 0)
        return
    console = Console(highlight=False)
    from klinic.report.live import Follower

    leaving = suppress(KeyboardInterrupt)  # also while the first look is taken
    with leaving, _ended_by_signals(), closing(Follower(run)) as follower:
        # not the console's word for it, which FORCE_COLOR changes: a pipe has no screen
        if sys.stdout.isatty() and not console.is_dumb_terminal:
            _show(follower, console)
        else:
            _tell(follower)


def _serve(run: Path, port: int) -> None:
    """Serve the page of the report until somebody stops it."""
    require("plot", "matplotlib")
    from klinic.report.serving import PortTakenError, open_server

    try:
        server = open_server(run, port)
    except PortTakenError as error:
        raise ConfigError(str(error)) from error
    with server, _ended_by_signals():
        typer.echo(f"Open {server.address}")
        typer.echo("Only this machine can, and only by this address. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("Ended.")


def _show(follower: "Follower", console: "Console") -> None:
    """Paint the screen anew until the run is over or somebody leaves."""
    from rich.console import Group

    from klinic.report.live_view import phase_line, screen

    sight, pressed = follower.look(), ""
    with suppress(KeyboardInterrupt), Aside() as aside:
        while not sight.phase.is_over and pressed not in LEAVE:
            aside.wait()  # outside of its screen, with the terminal as it was
            with keyboard() as keys, _unwrapped(console), console.screen(hide_cursor=True) as shown:
                before = None
                while not (sight.phase.is_over or pressed in LEAVE or aside.asked):
                    lines = screen(sight, console)
                    if (console.size, lines) != before:
                        shown.update(Group(*lines))
                        before = (console.size, lines)
                    pressed = keys.wait(0.0 if sight.more else EVERY)
                    sight = follower.look()
    height = console.height - 3  # below it, what is said last and a prompt
    for line in screen(sight, console, height) if sight.phase.is_over else ():
        console.print(line, no_wrap=True, crop=True)
    say(console, phase_line(sight))


def _tell(follower: "Follower") -> None:
    """Print a line a step, and one for whatever else happens; no control codes."""
    problem, phase = "", None
    try:
        while True:
            sight = follower.look()
            for line in _news(sight):
                typer.echo(line)
            if sight.problem not in ("", problem):
                typer.echo(harmless(sight.problem))
            problem = sight.problem
            if not sight.more:
                phase = _print_phase(sight, phase)
                if phase.is_over:
                    return
                time.sleep(EVERY)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read this has gone, and Python shall not complain of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_phase(sight: "Sight", before: "Phase | None") -> "Phase":
    """Print where the run is in its life, if that has changed; return it."""
    from klinic.report.live_view import phase_line

    if sight.phase != before:
        typer.echo(phase_line(sight))
    return sight.phase


def _news(sight: "Sight") -> Iterator[str]:
    """Yield a line for whatever is new, in the order of steps."""
    from klinic.report.live_view import event_line, step_line

    if sight.back_to is not None:
        yield f"the run went back to step {sight.back_to}"
    told = [(m["step"], 0, step_line(m, sight.max_steps)) for m in sight.new_steps]
    told += [(_step_of(event), 1, event_line(event)) for event in sight.new_events]
    for _, _, line in sorted(told, key=lambda one: one[:2]):
        yield line


def _step_of(event: Mapping[str, Any]) -> int:
    from klinic.evidence.numbers import as_step

    return as_step(event.get("step")) or 0


class Aside:
    """Ctrl-Z, which must wait until the terminal is put back."""

    def __init__(self) -> None:
        self.asked = False
        self._number = getattr(signal, "SIGTSTP", None)

    def __enter__(self) -> "Aside":
        # a shell that has no jobs lets it be ignored
        if self._number is not None and signal.getsignal(self._number) == signal.SIG_DFL:
            signal.signal(self._number, self._on)
        else:
            self._number = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._number is not None:
            signal.signal(self._number, signal.SIG_DFL)

    def _on(self, *_: object) -> None:
        self.asked = True

    def wait(self) -> None:
        """Stop this process, if that was asked for, until somebody lets it go on."""
        if self.asked:
            self.asked = False
            os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def _unwrapped(console: "Console") -> Iterator[None]:
    """Cut lines at the edge: a glyph that is wider than it says must not shift those below."""
    console.file.write(NO_WRAP)
    try:
        yield
    finally:
        console.file.write(WRAP)
        console.file.flush()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave in order when asked to end, so that the terminal is put back."""

    def leave(number: int, _: Any) -> NoReturn:
        raise typer.Exit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
