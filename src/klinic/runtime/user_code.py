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

STANDARD_STREAMS = (0, 1, 2)
GUARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FORK_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h

_real_exit = os._exit
_is_user_process = False
_needed_descriptors: set[int] = set()
_reported_changes: set[tuple[str, str]] = set()
_thread_owners: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()


class ExitCalled(SystemExit):
    """A user function called `os._exit`, which would have ended the run silently."""


class DescriptorClosedError(FunctionError):
    """A user function closed a file descriptor that the run needs."""


@contextmanager
def guard_process(name: str) -> Iterator[None]:
    """Guard the process during a user function; `name` labels the function in reports."""
    if _is_user_process:
        yield
        return
    state = _ProcessState(name)
    os._exit = state.raise_on_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = _real_exit
        state.exit_if_forked()
        state.restore_state()


def disable_guard() -> None:
    """Disable the guard: this process belongs to the function, and the run monitors its exit."""
    global _is_user_process  # noqa: PLW0603 - process-wide
    _is_user_process = True


@contextmanager
def protect_descriptor(descriptor: int) -> Iterator[None]:
    """Raise an error that names the function if one closes this descriptor."""
    _needed_descriptors.add(descriptor)
    try:
        yield
    finally:
        _needed_descriptors.discard(descriptor)


def thread_owner(thread: threading.Thread) -> str:
    """Return the name of the user function that started a thread; empty if none did."""
    return _thread_owners.get(thread, "")


class _ProcessState:
    """The process state before a call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = os.getpid()
        self._directory = _working_directory()
        self._file_identities = {
            number: _file_identity(number) for number in (*STANDARD_STREAMS, *_needed_descriptors)
        }
        self._threads = set(threading.enumerate())
        self._streams = sys.stdout, sys.stderr
        self._signals = _signal_handlers()
        self._torch = _torch_settings()

    def raise_on_exit(self, code: int) -> NoReturn:
        """Replace `os._exit`: raise in the run's process, exit in a process the function forked."""
        if os.getpid() != self._owner:
            _real_exit(code)
        raise ExitCalled(f"os._exit({code!r})")

    def exit_if_forked(self) -> None:
        """Exit if this process is a fork that the call made, before it does the run's work."""
        if os.getpid() == self._owner:
            return
        message = (
            f"{self._name} forked the process and returned in both. The child is terminated.\n"
        )
        with suppress(OSError):
            os.write(2, message.encode())
        _real_exit(FORK_EXIT_CODE)

    def restore_state(self) -> None:
        """Restore changed process state; raise if that is impossible."""
        for thread in set(threading.enumerate()) - self._threads:
            _thread_owners[thread] = self._name
        self._restore_directory()
        self._restore_streams()
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                self._report_change(f"the handler of {signal.Signals(number).name}")
        for what, (value, setting) in self._torch.items():
            if setting.read() != value:
                setting.write(value)
                self._report_change(what)
        self._raise_if_closed()

    def _restore_directory(self) -> None:
        if self._directory is None or _working_directory() == self._directory:
            return
        os.chdir(self._directory)
        self._report_change("the working directory")

    def _restore_streams(self) -> None:
        for name, number, stream in zip(("stdout", "stderr"), (1, 2), self._streams, strict=True):
            if stream is not None and stream.closed:
                opened = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115 - stays open
                setattr(sys, name, opened)
                self._report_change(f"sys.{name}, which it closed,")

    def _raise_if_closed(self) -> None:
        closed = [
            number
            for number, identity in self._file_identities.items()
            if identity is not None and _file_identity(number) is None
        ]
        _reopen_streams(set(closed) & set(STANDARD_STREAMS))
        if closed:
            raise DescriptorClosedError(
                f"{self._name} closed file descriptors that it did not open ("
                f"{', '.join(map(str, closed))}), and the run needs them. Close only descriptors "
                "that the function opened, or set a timeout: it then runs in its own process."
            )

    def _report_change(self, what: str) -> None:
        if (self._name, what) in _reported_changes:
            return
        _reported_changes.add((self._name, what))
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{self._name} changed {what} of the process: restored.\n")


class _GlobalSetting:
    """Getter and setter of a global setting."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.read = read
        self.write = write


def _torch_settings() -> dict[str, tuple[Any, _GlobalSetting]]:
    """Return the torch settings that affect computation, with their current values."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_default_device"):  # not imported, or only partly
        return {}
    settings = {
        "torch's default dtype": _GlobalSetting(torch.get_default_dtype, torch.set_default_dtype),
        "torch's default device": _device_setting(torch),
        "torch's gradient mode": _GlobalSetting(torch.is_grad_enabled, torch.set_grad_enabled),
        "torch's number of threads": _GlobalSetting(torch.get_num_threads, torch.set_num_threads),
        "torch's deterministic mode": _GlobalSetting(
            torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
        ),
        "torch.Tensor.backward": _attribute_setting(torch.Tensor, "backward"),
    }
    if hasattr(torch.optim.AdamW.step, "hooked"):  # torch wraps it at the first optimizer
        settings["torch.optim.AdamW.step"] = _attribute_setting(torch.optim.AdamW, "step")
    return {name: (setting.read(), setting) for name, setting in settings.items()}


def _device_setting(torch: Any) -> _GlobalSetting:
    def write_device(device: Any) -> None:
        # None for the CPU: a set device slows down every tensor creation
        torch.set_default_device(None if device == torch.device("cpu") else device)

    return _GlobalSetting(torch.get_default_device, write_device)


def _attribute_setting(owner: Any, name: str) -> _GlobalSetting:
    return _GlobalSetting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - on the hot path of rewards
    except OSError:  # the directory was deleted
        return None


def _reopen_streams(closed: set[int]) -> None:
    """Reopen closed standard streams on /dev/null, so that no other file gets their number."""
    for number in sorted(closed):
        null_descriptor = os.open(os.devnull, os.O_RDWR)
        if null_descriptor != number:
            os.dup2(null_descriptor, number)
            os.close(null_descriptor)


def _file_identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _signal_handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in GUARDED_SIGNALS}
