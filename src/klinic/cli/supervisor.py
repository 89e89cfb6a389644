"""Runs training in a child process and restarts it when that process is lost.

The parent does not import torch, so an out-of-memory kill or a driver failure takes only the child.
A failure that the child reports (invalid recipe, failed reward, stopped run) is final; an
unexplained death is retried. An exit code counts only if klinic itself ended the process, and 0
only if the checkpoint of the last step is on disk: any user function may exit with any code.
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

from klinic.cli.plain_text import echo_text
from klinic.cli.process_exit import before_exit
from klinic.errors import LostError, UnfinishedError
from klinic.runtime import process_tree

if TYPE_CHECKING:
    from klinic.recipe.loading import LoadedRecipe

SUPERVISED = "KLINIC_SUPERVISED"
"""The pid of the supervising process; 0 disables supervision."""
EXIT_PIPE = "KLINIC_EXIT_PIPE"
"""The descriptor a run writes to on an orderly exit, which `os._exit` skips."""
MAX_RESTARTS = 3  # without a new step: four deaths at one step are not transient
PAUSE = 1.0  # seconds for devices and sockets to be released
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that request an end


def find_supervisor() -> int | None:
    """Return the supervisor's pid and die with it; 0 for unsupervised, None if not set.

    `torchrun` restarts its own processes, so they are unsupervised.
    """
    value = os.environ.pop(SUPERVISED, "0" if "RANK" in os.environ else None)
    if value is None:
        return None
    supervisor = int(value) if value.isdecimal() else 0
    pipe = os.environ.pop(EXIT_PIPE, "")
    if supervisor:
        process_tree.die_with_parent(supervisor)
        if pipe.isdecimal():
            announce = partial(_announce_exit, int(pipe), _pipe_identity(int(pipe)), os.getpid())
            atexit.register(announce)
            before_exit.append(announce)
    return supervisor


def _announce_exit(pipe: int, identity: tuple[int, int] | None, owner: int) -> None:
    """Report an orderly exit; not from a fork, and not into a reused descriptor."""
    if os.getpid() == owner and identity is not None and _pipe_identity(pipe) == identity:
        with suppress(OSError):
            os.write(pipe, b".")


def _pipe_identity(pipe: int) -> tuple[int, int] | None:
    try:
        os.set_inheritable(pipe, False)
        status = os.fstat(pipe)
    except OSError:  # user code closed it
        return None
    return status.st_dev, status.st_ino


def supervise(loaded: "LoadedRecipe") -> int:
    """Run this command in a child process until it ends; return its exit code."""
    process_tree.become_subreaper()
    child, history = _ChildProcess(), _RestartHistory(loaded)
    with child.forward_signals():
        while True:
            ending = child.run_command(history.next_command())
            process_tree.kill_descendants()
            if child.is_stopped() or not ending.is_loss:
                history.refuse_unfinished(ending, is_stopped=child.is_stopped())
                return ending.exit_code
            history.add_loss(ending)
            time.sleep(PAUSE)
            if child.is_stopped():
                return 128 + child.stopped_by


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessExit:
    """How the process of a run ended."""

    pid: int
    code: int
    """Exit code, or minus the signal number."""
    seconds: float
    """Lifetime of the process."""
    is_orderly: bool
    """Whether klinic ended the process; a function that calls `os._exit` leaves no trace."""

    @property
    def is_loss(self) -> bool:
        """Whether it died unexpectedly or exited with the resumable code."""
        return self.code == LostError.exit_code or (
            self.code < 0 and -self.code not in STOP_SIGNALS
        )

    @property
    def exit_code(self) -> int:
        """The exit code in shell convention."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def event_fields(self) -> dict[str, int]:
        return {"signal": -self.code} if self.code < 0 else {"exit_code": self.code}

    def __str__(self) -> str:
        if self.code < 0:
            return f"was killed by signal {-self.code} ({signal.strsignal(-self.code)})"
        return f"lost one of its processes (exit code {self.code})"


class _ChildProcess:
    """The process of a run, with signals forwarded to it."""

    def __init__(self) -> None:
        self.stopped_by = 0
        """The last signal that requested an end; 0 for none."""
        self._pid: int | None = None

    def is_stopped(self) -> bool:
        """Whether a signal requested an end."""
        return self.stopped_by != 0

    @contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Forward end signals to the child, except those ignored here (`nohup`)."""
        forwarded = [
            number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN
        ]
        before = {number: signal.signal(number, self._on_signal) for number in forwarded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_command(self, command: list[str]) -> _ProcessExit:
        """Start the child and wait for its end, reaping adopted processes meanwhile."""
        begun = time.monotonic()
        announced, pipe = os.pipe()
        os.set_inheritable(pipe, True)
        environment = {**os.environ, SUPERVISED: str(os.getpid()), EXIT_PIPE: str(pipe)}
        pid = self._pid = os.posix_spawn(command[0], command, environment)
        os.close(pipe)
        if self.is_stopped():  # a signal arrived during the start
            os.kill(pid, self.stopped_by)
        ended, status = os.wait()
        while ended != pid:
            ended, status = os.wait()
        self._pid = None
        code = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - begun
        return _ProcessExit(pid=pid, code=code, seconds=seconds, is_orderly=_has_written(announced))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.stopped_by = number
        if self._pid is not None and not (number == signal.SIGINT and _is_foreground()):
            os.kill(self._pid, number)


def _has_written(announced: int) -> bool:
    """Whether the pipe has data; a fork of the run may still hold it open."""
    os.set_blocking(announced, False)
    try:
        return bool(os.read(announced, 1))
    except BlockingIOError:
        return False
    finally:
        os.close(announced)


def _is_foreground() -> bool:
    """Whether this is the terminal's foreground job: then Ctrl-C reached the child too."""
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


class _RestartHistory:
    """Restart count and progress of a run."""

    def __init__(self, loaded: "LoadedRecipe") -> None:
        self._loaded = loaded
        self._folder: Path | None = None
        self._step = 0
        self._restarts = 0

    def next_command(self) -> list[str]:
        """Return the original command, with --resume once a run folder exists."""
        resume, folder, arguments = [], [], sys.argv[2:]
        if self._folder is not None:
            resume, arguments = ["--resume"], [word for word in arguments if word != "--start-over"]
            if self._loaded.recipe.output.dir is None:  # the newest may be another run
                folder = [f"output.dir={json.dumps(str(self._folder))}"]
        # -P: a json.py in the working directory must not shadow Python's
        klinic = [sys.executable, "-P", "-m", "klinic.cli", "train"]
        return [*klinic, *resume, *arguments, *folder]

    def add_loss(self, ending: _ProcessExit) -> None:
        """Count a loss and report it; raise if the restart limit is reached."""
        step = self._step_after(ending)
        if step > self._step:
            self._step, self._restarts = step, 0
        if self._restarts == MAX_RESTARTS:
            raise LostError(
                f"the run {ending} after step {step}, and {MAX_RESTARTS} restarts in a row "
                "made no new step. Its output is above; if that shows no error, it may have run "
                "out of memory (--dry-run estimates the need). Fix the cause and continue with "
                "--resume."
            )
        self._restarts += 1
        where = "Restarting" if self._folder is None else f"Continuing in {self._folder}"
        count = f"restart {self._restarts} of at most {MAX_RESTARTS} without a new step"
        says = f"The run {ending} after step {step}. {where}: {count}."
        echo_text(says, err=True)
        self._write_event(step, says, ending)

    def refuse_unfinished(self, ending: _ProcessExit, *, is_stopped: bool) -> None:
        """Raise if the exit code contradicts the state of the run."""
        if ending.code < 0 or (ending.code > 0 and (ending.is_orderly or is_stopped)):
            return
        step, last = self._step_after(ending), self._loaded.recipe.loop.max_steps
        if ending.code == 0 and self._has_saved(last):
            return
        go_on = "" if self._folder is None else f" Then continue in {self._folder} with --resume."
        raise UnfinishedError(
            f"the process of the run exited with code {ending.code} after step {step} of {last}, "
            "before the last step was saved. If no error is shown above, klinic did not end it: "
            "a reward, another function of yours or a library called os._exit or exit. "
            f"Make it return or raise instead.{go_on}"
        )

    def _has_saved(self, step: int) -> bool:
        """Whether a checkpoint of this step or a later one is on disk."""
        from klinic.training import checkpoint

        return (
            self._folder is not None
            and max(checkpoint.checkpoint_steps(self._folder), default=-1) >= step
        )

    def _step_after(self, ending: _ProcessExit) -> int:
        """Return the last step of the run; 0 while its folder is unknown."""
        from klinic.evidence.files import Journal
        from klinic.evidence.run_facts import METRICS, RECIPE
        from klinic.training.run_folder import entry_step, last_locked_by

        locked = last_locked_by(ending.pid, self._loaded.recipe, self._loaded.name)
        if locked is not None and (locked / RECIPE).is_file():
            self._folder = locked
        if self._folder is None:
            return 0
        folder = self._folder
        entries = Journal(folder / METRICS).entries()
        return max((entry_step(entry, folder) for entry in entries), default=0)

    def _write_event(self, step: int, says: str, ending: _ProcessExit) -> None:
        from klinic.evidence.files import Journal
        from klinic.evidence.run_facts import EVENTS
        from klinic.training.run_folder import RESTARTED_EVENT

        if self._folder is None:
            return
        event = {"step": step, "event": RESTARTED_EVENT, "says": says, **ending.event_fields}
        Journal(self._folder / EVENTS).append({**event, "seconds": round(ending.seconds, 1)})
