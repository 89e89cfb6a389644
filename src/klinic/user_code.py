"""Guards the process during a call of a user function: reward, `data.map`, `sampling.reply`.

Process state that the function changes is restored and reported once: working directory, torch's
global settings, signal handlers, standard streams. A closed descriptor that the run needs cannot be
restored: it raises an error that names the function. A fork that returns is terminated, so that it
never trains. `os._exit` raises if the function calls it in the process of the run.

RNG state is left alone: klinic uses its own generators, and a function may rely on the global one.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from klinic.errors import FunctionError

STREAMS = (0, 1, 2)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FORKED = 70  # EX_SOFTWARE of sysexits.h

_leave = os._exit
_is_function_own = False
_needed: set[int] = set()
_reported: set[tuple[str, str]] = set()
_started: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()


class ExitCalled(SystemExit):
    """A user function called `os._exit`, which would have ended the run silently."""


class DescriptorClosedError(FunctionError):
    """A user function closed a file descriptor that the run needs."""


@contextmanager
def guard(name: str) -> Iterator[None]:
    """Guard the process during a user function; `name` labels the function in reports."""
    if _is_function_own:
        yield
        return
    before = _Process(name)
    os._exit = before.refuse_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = _leave
        before.end_fork()
        before.restore()


def give_process() -> None:
    """Disable the guard: this process belongs to the function, and the run monitors its exit."""
    global _is_function_own  # noqa: PLW0603 - process-wide
    _is_function_own = True


@contextmanager
def needing(descriptor: int) -> Iterator[None]:
    """Raise an error that names the function if one closes this descriptor."""
    _needed.add(descriptor)
    try:
        yield
    finally:
        _needed.discard(descriptor)


def who_started(thread: threading.Thread) -> str:
    """Return the name of the user function that started a thread; empty if none did."""
    return _started.get(thread, "")


class _Process:
    """The process state before a call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = os.getpid()
        self._folder = _folder()
        self._files = {number: _identity(number) for number in (*STREAMS, *_needed)}
        self._threads = set(threading.enumerate())
        self._streams = sys.stdout, sys.stderr
        self._signals = _handlers()
        self._torch = _torch_settings()

    def refuse_exit(self, code: int) -> NoReturn:
        """Replace `os._exit`: raise in the run's process, exit in a process the function forked."""
        if os.getpid() != self._owner:
            _leave(code)
        raise ExitCalled(f"os._exit({code!r})")

    def end_fork(self) -> None:
        """Exit if this process is a fork that the call made, before it does the run's work."""
        if os.getpid() == self._owner:
            return
        says = f"{self._name} forked the process and returned in both. The child is terminated.\n"
        with suppress(OSError):
            os.write(2, says.encode())
        _leave(FORKED)

    def restore(self) -> None:
        """Restore changed process state; raise if that is impossible."""
        for thread in set(threading.enumerate()) - self._threads:
            _started[thread] = self._name
        self._restore_folder()
        self._restore_streams()
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                self._report(f"the handler of {signal.Signals(number).name}")
        for what, (value, setting) in self._torch.items():
            if setting.read() != value:
                setting.write(value)
                self._report(what)
        self._refuse_closed()

    def _restore_folder(self) -> None:
        if self._folder is None or _folder() == self._folder:
            return
        os.chdir(self._folder)
        self._report("the working directory")

    def _restore_streams(self) -> None:
        for name, number, stream in zip(("stdout", "stderr"), (1, 2), self._streams, strict=True):
            if stream is not None and stream.closed:
                opened = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115 - stays open
                setattr(sys, name, opened)
                self._report(f"sys.{name}, which it closed,")

    def _refuse_closed(self) -> None:
        closed = [
            number
            for number, identity in self._files.items()
            if identity is not None and _identity(number) is None
        ]
        _fill(set(closed) & set(STREAMS))
        if closed:
            raise DescriptorClosedError(
                f"{self._name} closed file descriptors that it did not open ("
                f"{', '.join(map(str, closed))}), and the run needs them. Close only descriptors "
                "that the function opened, or set a timeout: it then runs in its own process."
            )

    def _report(self, what: str) -> None:
        if (self._name, what) in _reported:
            return
        _reported.add((self._name, what))
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{self._name} changed {what} of the process: restored.\n")


class _Setting:
    """Getter and setter of a global setting."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.read = read
        self.write = write


def _torch_settings() -> dict[str, tuple[Any, _Setting]]:
    """Return the torch settings that affect computation, with their current values."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_default_device"):  # not imported, or only partly
        return {}
    known = {
        "torch's default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
        "torch's default device": _device(torch),
        "torch's gradient mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
        "torch's number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
        "torch's deterministic mode": _Setting(
            torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
        ),
        "torch.Tensor.backward": _attribute(torch.Tensor, "backward"),
    }
    if hasattr(torch.optim.AdamW.step, "hooked"):  # torch wraps it at the first optimizer
        known["torch.optim.AdamW.step"] = _attribute(torch.optim.AdamW, "step")
    return {name: (setting.read(), setting) for name, setting in known.items()}


def _device(torch: Any) -> _Setting:
    def write(device: Any) -> None:
        # None for the CPU: a set device slows down every tensor creation
        torch.set_default_device(None if device == torch.device("cpu") else device)

    return _Setting(torch.get_default_device, write)


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - on the hot path of rewards
    except OSError:  # the directory was deleted
        return None


def _fill(closed: set[int]) -> None:
    """Reopen closed standard streams on /dev/null, so that no other file gets their number."""
    for number in sorted(closed):
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)


def _identity(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in SIGNALS}
