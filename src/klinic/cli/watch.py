"""`klinic watch RUN`: follow a run in a terminal, a pipe, or a browser.

Key presses are read without echo, and the terminal is restored afterwards.
"""

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

from klinic.cli.plain_text import echo_text
from klinic.cli.printing import print_line
from klinic.errors import ConfigError
from klinic.runtime.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.report.live import Phase, RunSnapshot, RunWatcher

import select


class Keyboard:
    """Waits for a key press, or only for the timeout without a keyboard."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def wait_key(self, seconds: float) -> str:
        """Return the key pressed within the timeout; "" for none."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._handle], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._handle, 32)
        if not pressed:  # end of file: the keyboard is gone
            self._handle = None
        return pressed[:1].decode("ascii", "replace")


@contextmanager
def open_keyboard() -> Iterator[Keyboard]:
    """Enable unbuffered key input. Ctrl-C stays a signal."""
    try:
        import termios
        import tty
    except ImportError:  # not a POSIX system
        yield Keyboard(None)
        return
    try:
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        in_front = os.tcgetpgrp(handle) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):  # stdin may be None
        in_front = False
    if not in_front:  # a background job must not change the terminal
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(handle)
        yield Keyboard(handle)
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


POLL_SECONDS = 0.5  # seconds between two polls
QUIT_KEYS = ("q", "Q")
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

    from klinic.evidence.readers.run_folders import refuse_several
    from klinic.evidence.schema import refuse_newer

    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is not a folder. Give a run folder: runs/arithmetic.")
    refuse_newer(run)
    refuse_several(run)
    if port is not None and not web:
        raise ConfigError("--port is for --web only.")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # shades, if the encoding is ASCII
    if web:
        _serve_page(run, port or 0)
        return
    console = Console(highlight=False)
    from klinic.report.live import RunWatcher

    interrupted = suppress(KeyboardInterrupt)  # also during the first poll
    with interrupted, _exit_on_signals(), closing(RunWatcher(run)) as watcher:
        # not console.is_terminal, which FORCE_COLOR changes: a pipe has no screen
        if sys.stdout.isatty() and not console.is_dumb_terminal:
            _run_screen(watcher, console)
        else:
            _print_updates(watcher)


def _serve_page(run: Path, port: int) -> None:
    """Serve the report page until interrupted."""
    from klinic.report.serving import PortTakenError, open_server

    try:
        server = open_server(run, port)
    except PortTakenError as error:
        raise ConfigError(str(error)) from error
    with server, _exit_on_signals():
        typer.echo(f"Open {server.url}")
        echo_text("Reachable only from this machine at this address. Ctrl-C stops the server.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("Stopped.")


def _run_screen(watcher: "RunWatcher", console: "Console") -> None:
    """Redraw the screen until the run is over or the user quits."""
    from rich.console import Group
    from rich.control import Control

    from klinic.report.live_view import phase_line, render_screen

    snapshot, pressed = watcher.take_snapshot(), ""
    with suppress(KeyboardInterrupt), SuspendHandler() as suspender:
        while not snapshot.phase.is_over and pressed not in QUIT_KEYS:
            suspender.suspend_if_requested()  # with the terminal restored
            with (
                open_keyboard() as keys,
                _disable_line_wrap(console),
                console.screen(hide_cursor=True) as shown,
            ):
                before = None
                while not (
                    snapshot.phase.is_over or pressed in QUIT_KEYS or suspender.is_requested
                ):
                    lines = render_screen(snapshot, console)
                    if (console.size, lines) != before:
                        console.control(Control.home())  # rich prints at the cursor
                        shown.update(Group(*lines))
                        before = (console.size, lines)
                    pressed = keys.wait_key(0.0 if snapshot.has_more else POLL_SECONDS)
                    snapshot = watcher.take_snapshot()
    height = console.height - 3  # leaves room for the closing line and a prompt
    for line in render_screen(snapshot, console, height) if snapshot.phase.is_over else ():
        console.print(line, no_wrap=True, crop=True)
    print_line(console, phase_line(snapshot))


def _print_updates(watcher: "RunWatcher") -> None:
    """Print one line per step and per event, without control codes."""
    problem, phase, tenth = "", None, -1
    try:
        while True:
            snapshot = watcher.take_snapshot()
            tenth = _print_warm_start(snapshot, tenth)
            if lines := list(_new_lines(snapshot)):
                typer.echo("\n".join(lines))
            if snapshot.problem not in ("", problem):
                typer.echo(escape_for_terminal(snapshot.problem))
            problem = snapshot.problem
            if not snapshot.has_more:
                phase = _print_phase(snapshot, phase)
                if phase.is_over:
                    return
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader exited; prevents Python's own error message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_warm_start(snapshot: "RunSnapshot", before: int) -> int:
    """Print the progress of a warm start at each tenth; return the tenth."""
    from klinic.report.live_view import warm_start_line

    status = snapshot.warm_start
    if status is None or not status.num_steps:
        return before
    tenth = 10 * status.step // status.num_steps
    if tenth != before:
        typer.echo(warm_start_line(status))
    return tenth


def _print_phase(snapshot: "RunSnapshot", before: "Phase | None") -> "Phase":
    """Print the state of the run if it changed; return it."""
    from klinic.report.live_view import phase_line

    if snapshot.phase != before:
        typer.echo(phase_line(snapshot))
    return snapshot.phase


def _new_lines(snapshot: "RunSnapshot") -> Iterator[str]:
    """Yield a line per new step or event, in step order."""
    from klinic.report.live_view import event_line, step_line

    if snapshot.back_to is not None:
        yield f"the run rolled back to step {snapshot.back_to}"
    lines = [(m["step"], 0, step_line(m, snapshot.max_steps)) for m in snapshot.new_steps]
    lines += [(_step_of(event), 1, event_line(event)) for event in snapshot.new_events]
    for _, _, line in sorted(lines, key=lambda one: one[:2]):
        yield line


def _step_of(event: Mapping[str, Any]) -> int:
    from klinic.evidence.numbers import as_step

    return as_step(event.get("step")) or 0


class SuspendHandler:
    """Defers Ctrl-Z until the terminal is restored."""

    def __init__(self) -> None:
        self.is_requested = False
        self._number = getattr(signal, "SIGTSTP", None)

    def __enter__(self) -> "SuspendHandler":
        # a shell without job control ignores the signal
        if self._number is not None and signal.getsignal(self._number) == signal.SIG_DFL:
            signal.signal(self._number, self._on_signal)
        else:
            self._number = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._number is not None:
            signal.signal(self._number, signal.SIG_DFL)

    def _on_signal(self, *_: object) -> None:
        self.is_requested = True

    def suspend_if_requested(self) -> None:
        """Suspend this process if Ctrl-Z was pressed."""
        if self.is_requested:
            self.is_requested = False
            os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def _disable_line_wrap(console: "Console") -> Iterator[None]:
    """Crop lines at the edge: a glyph wider than reported must not shift the lines below."""
    console.file.write(NO_WRAP)
    try:
        yield
    finally:
        console.file.write(WRAP)
        console.file.flush()


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit cleanly on SIGTERM and SIGHUP, so that the terminal is restored."""

    def exit_with_signal(number: int, _: Any) -> NoReturn:
        raise typer.Exit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, exit_with_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
