"""`klinic watch RUN`: follow a run in a terminal, a pipe, or a browser."""

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

EVERY = 0.5  # seconds between two polls
LEAVE = ("q", "Q")
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"

Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run folder; it may not exist yet.", show_default=False),
]
Web = Annotated[bool, typer.Option("--web", help="Serve the report to browsers on this machine.")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="With --web.", show_default="a free one")
]


def watch(run: Run, web: Web = False, port: Port = None) -> None:
    """Follow a run: metrics, log-prob gaps, the newest tokens, events."""
    from rich.console import Console

    from klinic.evidence.schema import refuse_newer

    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is not a folder. Give a run folder: runs/arithmetic.")
    refuse_newer(run)
    if port is not None and not web:
        raise ConfigError("--port is for --web only.")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # shades, if the encoding is ASCII
    if web:
        _serve(run, port or 0)
        return
    console = Console(highlight=False)
    from klinic.report.live import Follower

    leaving = suppress(KeyboardInterrupt)  # also during the first poll
    with leaving, _ended_by_signals(), closing(Follower(run)) as follower:
        # not console.is_terminal, which FORCE_COLOR changes: a pipe has no screen
        if sys.stdout.isatty() and not console.is_dumb_terminal:
            _show(follower, console)
        else:
            _tell(follower)


def _serve(run: Path, port: int) -> None:
    """Serve the report page until interrupted."""
    require("plot", "matplotlib")
    from klinic.report.serving import PortTakenError, open_server

    try:
        server = open_server(run, port)
    except PortTakenError as error:
        raise ConfigError(str(error)) from error
    with server, _ended_by_signals():
        typer.echo(f"Open {server.address}")
        typer.echo("Reachable only from this machine at this address. Ctrl-C stops the server.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("Stopped.")


def _show(follower: "Follower", console: "Console") -> None:
    """Redraw the screen until the run is over or the user quits."""
    from rich.console import Group

    from klinic.report.live_view import phase_line, screen

    sight, pressed = follower.look(), ""
    with suppress(KeyboardInterrupt), Aside() as aside:
        while not sight.phase.is_over and pressed not in LEAVE:
            aside.wait()  # outside the alternate screen, with the terminal restored
            with keyboard() as keys, _unwrapped(console), console.screen(hide_cursor=True) as shown:
                before = None
                while not (sight.phase.is_over or pressed in LEAVE or aside.asked):
                    lines = screen(sight, console)
                    if (console.size, lines) != before:
                        shown.update(Group(*lines))
                        before = (console.size, lines)
                    pressed = keys.wait(0.0 if sight.more else EVERY)
                    sight = follower.look()
    height = console.height - 3  # leaves room for the closing line and a prompt
    for line in screen(sight, console, height) if sight.phase.is_over else ():
        console.print(line, no_wrap=True, crop=True)
    say(console, phase_line(sight))


def _tell(follower: "Follower") -> None:
    """Print one line per step and per event, without control codes."""
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
    except BrokenPipeError:  # the reader exited; prevents Python's own error message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_phase(sight: "Sight", before: "Phase | None") -> "Phase":
    """Print the state of the run if it changed; return it."""
    from klinic.report.live_view import phase_line

    if sight.phase != before:
        typer.echo(phase_line(sight))
    return sight.phase


def _news(sight: "Sight") -> Iterator[str]:
    """Yield a line per new step or event, in step order."""
    from klinic.report.live_view import event_line, step_line

    if sight.back_to is not None:
        yield f"the run rolled back to step {sight.back_to}"
    told = [(m["step"], 0, step_line(m, sight.max_steps)) for m in sight.new_steps]
    told += [(_step_of(event), 1, event_line(event)) for event in sight.new_events]
    for _, _, line in sorted(told, key=lambda one: one[:2]):
        yield line


def _step_of(event: Mapping[str, Any]) -> int:
    from klinic.evidence.numbers import as_step

    return as_step(event.get("step")) or 0


class Aside:
    """Defers Ctrl-Z until the terminal is restored."""

    def __init__(self) -> None:
        self.asked = False
        self._number = getattr(signal, "SIGTSTP", None)

    def __enter__(self) -> "Aside":
        # a shell without job control ignores the signal
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
        """Suspend this process if Ctrl-Z was pressed."""
        if self.asked:
            self.asked = False
            os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def _unwrapped(console: "Console") -> Iterator[None]:
    """Crop lines at the edge: a glyph wider than reported must not shift the lines below."""
    console.file.write(NO_WRAP)
    try:
        yield
    finally:
        console.file.write(WRAP)
        console.file.flush()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Exit cleanly on SIGTERM and SIGHUP, so that the terminal is restored."""

    def leave(number: int, _: Any) -> NoReturn:
        raise typer.Exit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
