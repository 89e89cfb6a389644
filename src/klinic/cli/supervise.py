"""A run in a process of its own, and a parent that starts it again when that process is lost.

The parent imports no torch: memory that runs out, or a driver that fails, takes the run and leaves
the parent. What the run says about itself (a recipe that cannot work, a reward that failed, a run
that was stopped) is final; what killed it without a word is not. An exit code counts only where
klinic itself ended the process, and 0 only where the checkpoint of the last step is on disk: any
function that the run calls may end it with any code.
"""

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from klinic import orphans
from klinic.cli.leaving import before_exit
from klinic.errors import LostError, UnfinishedError

if TYPE_CHECKING:
    from klinic.recipe.loading import Loaded

SUPERVISED = "KLINIC_SUPERVISED"
"""The number of the process that supervises this one; 0 where nobody shall."""
EXIT_PIPE = "KLINIC_EXIT_PIPE"
"""The descriptor that a run writes to when it exits in order, which `os._exit` does not."""
MOST_RESTARTS = 3  # without a new step: what kills a run at one place four times is no accident
PAUSE = 1.0  # seconds for a device or a socket to be given back
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # whoever sends one wants the run to end


def find_supervisor() -> int | None:
    """Return who supervises this process, and die with it; 0 where nobody shall, None for no word.

    Under `torchrun` nobody shall: it starts its processes again itself.
    """
    told = os.environ.pop(SUPERVISED, "0" if "RANK" in os.environ else None)
    if told is None:
        return None
    supervisor = int(told) if told.isdecimal() else 0
    pipe = os.environ.pop(EXIT_PIPE, "")
    if supervisor:
        orphans.die_with(supervisor)
        if pipe.isdecimal():
            announce = partial(_announce_exit, int(pipe), _identity(int(pipe)), os.getpid())
            atexit.register(announce)
            before_exit.append(announce)
    return supervisor


def _announce_exit(pipe: int, identity: tuple[int, int] | None, owner: int) -> None:
    """Report an exit in order; not from a fork, and not into a file that took the number over."""
    if os.getpid() == owner and identity is not None and _identity(pipe) == identity:
        with suppress(OSError):
            os.write(pipe, b".")


def _identity(pipe: int) -> tuple[int, int] | None:
    try:
        os.set_inheritable(pipe, False)
        found = os.fstat(pipe)
    except OSError:  # a function has closed it
        return None
    return found.st_dev, found.st_ino


def supervise(loaded: "Loaded") -> int:
    """Run this command in a process of its own until it has ended; return its exit code."""
    orphans.adopt()
    child, history = _Child(), _History(loaded)
    with child.hearing():
        while True:
            ending = child.run(history.command())
            orphans.end_descendants()
            if child.is_stopped() or not ending.is_loss:
                history.refuse_unfinished(ending, is_stopped=child.is_stopped())
                return ending.exit_code
            history.add(ending)
            time.sleep(PAUSE)
            if child.is_stopped():
                return 128 + child.stopped_by


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """How the process of a run ended."""

    pid: int
    code: int
    """Its exit code, or minus the signal that killed it."""
    seconds: float
    """That it had lived."""
    in_order: bool
    """Whether klinic ended it; a function that calls `os._exit` does so without a word."""

    @property
    def is_loss(self) -> bool:
        """Whether it ended without a word, or said that it can go on."""
        return self.code == LostError.exit_code or (self.code < 0 and -self.code not in STOPS)

    @property
    def exit_code(self) -> int:
        """As a shell tells it."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def facts(self) -> dict[str, int]:
        return {"signal": -self.code} if self.code < 0 else {"exit_code": self.code}

    def __str__(self) -> str:
        if self.code < 0:
            return f"was killed by signal {-self.code} ({signal.strsignal(-self.code)})"
        return f"lost one of its processes (exit code {self.code})"


class _Child:
    """The process of a run, and what it is asked by signals to this one."""

    def __init__(self) -> None:
        self.stopped_by = 0
        """The last signal that asked it to end, if one did."""
        self._pid: int | None = None

    def is_stopped(self) -> bool:
        """Whether somebody has asked it to end."""
        return self.stopped_by != 0

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Pass on signals that ask a run to end, but those that are ignored here (`nohup`)."""
        heard = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: list[str]) -> _Ending:
        """Start it, and wait until it has ended; what it leaves behind is reaped on the way."""
        begun = time.monotonic()
        announced, pipe = os.pipe()
        os.set_inheritable(pipe, True)
        told = {**os.environ, SUPERVISED: str(os.getpid()), EXIT_PIPE: str(pipe)}
        pid = self._pid = os.posix_spawn(command[0], command, told)
        os.close(pipe)
        if self.is_stopped():  # while it was being started
            os.kill(pid, self.stopped_by)
        ended, status = os.wait()
        while ended != pid:
            ended, status = os.wait()
        self._pid = None
        code = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - begun
        return _Ending(pid=pid, code=code, seconds=seconds, in_order=_has_written(announced))

    def _on(self, number: int, _: FrameType | None) -> None:
        self.stopped_by = number
        if self._pid is not None and not (number == signal.SIGINT and _is_in_front()):
            os.kill(self._pid, number)


def _has_written(announced: int) -> bool:
    """Whether anything was written to a pipe, which a fork of a run may still hold open."""
    os.set_blocking(announced, False)
    try:
        return bool(os.read(announced, 1))
    except BlockingIOError:
        return False
    finally:
        os.close(announced)


def _is_in_front() -> bool:
    """Whether this is what a terminal runs: then Ctrl-C has reached the child as well."""
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


class _History:
    """How often a run was lost, and how far it had come."""

    def __init__(self, loaded: "Loaded") -> None:
        self._loaded = loaded
        self._folder: Path | None = None
        self._step = 0
        self._restarts = 0

    def command(self) -> list[str]:
        """Return the command as it was given, and to go on where there is a run to go on with."""
        resume, folder, given = [], [], sys.argv[2:]
        if self._folder is not None:
            resume, given = ["--resume"], [word for word in given if word != "--start-over"]
            if self._loaded.recipe.output.dir is None:  # the last run of its name may be another's
                folder = [f"output.dir={json.dumps(str(self._folder))}"]
        # -P: a file json.py where klinic is run must not be taken for Python's
        klinic = [sys.executable, "-P", "-m", "klinic.cli", "train"]
        return [*klinic, *resume, *given, *folder]

    def add(self, ending: _Ending) -> None:
        """Count a loss, and tell of it; raise where it is one too many."""
        step = self._step_after(ending)
        if step > self._step:
            self._step, self._restarts = step, 0
        if self._restarts == MOST_RESTARTS:
            raise LostError(
                f"the run {ending} after step {step}, and {MOST_RESTARTS} restarts in a row "
                "brought no new step. What it said is above; if it said nothing, look for memory "
                "that ran out (--dry-run shows what a run needs). Mend that, and go on with "
                "--resume."
            )
        self._restarts += 1
        where = "It starts again" if self._folder is None else f"It goes on in {self._folder}"
        count = f"restart {self._restarts} of at most {MOST_RESTARTS} without a new step"
        says = f"The run {ending} after step {step}. {where}: {count}."
        typer.echo(says, err=True)
        self._write(step, says, ending)

    def refuse_unfinished(self, ending: _Ending, *, is_stopped: bool) -> None:
        """Raise where an exit code is not the truth about the run."""
        if ending.code < 0 or (ending.code > 0 and (ending.in_order or is_stopped)):
            return
        step, last = self._step_after(ending), self._loaded.recipe.loop.max_steps
        if ending.code == 0 and self._has_saved(last):
            return
        go_on = "" if self._folder is None else f" Then go on in {self._folder} with --resume."
        raise UnfinishedError(
            f"the process of the run exited with code {ending.code} after step {step} of {last}, "
            "before the last step was saved. If no sentence above says why, it was not klinic "
            "that ended it: a reward or another function of yours, or a library, called os._exit "
            f"or exit. Make it return or raise instead.{go_on}"
        )

    def _has_saved(self, step: int) -> bool:
        """Whether a checkpoint of this step or a later one is on disk."""
        from klinic.loop import checkpoint

        return self._folder is not None and max(checkpoint.steps(self._folder), default=-1) >= step

    def _step_after(self, ending: _Ending) -> int:
        """Return the last step of the run, once it is known where it is."""
        from klinic.evidence.files import Journal
        from klinic.evidence.run_facts import METRICS, RECIPE
        from klinic.loop.folder import held_by, step_of

        held = held_by(ending.pid, self._loaded.recipe, self._loaded.name)
        if held is not None and (held / RECIPE).is_file():
            self._folder = held
        if self._folder is None:
            return 0
        folder = self._folder
        entries = Journal(folder / METRICS).entries()
        return max((step_of(entry, folder) for entry in entries), default=0)

    def _write(self, step: int, says: str, ending: _Ending) -> None:
        from klinic.evidence.files import Journal
        from klinic.evidence.run_facts import EVENTS
        from klinic.loop.folder import RESTARTED

        if self._folder is None:
            return
        event = {"step": step, "event": RESTARTED, "says": says, **ending.facts}
        Journal(self._folder / EVENTS).append({**event, "seconds": round(ending.seconds, 1)})
