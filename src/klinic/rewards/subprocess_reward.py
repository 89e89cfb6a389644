"""Runs a reward function in a subprocess with a time limit, so that it may hang or crash.

The worker leads a process group, so its children are killed with it, except those that left the
group (a daemon with its own session).
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from klinic.errors import ConfigError, FunctionError, RewardError
from klinic.rewards.invoke import RewardCall, locate_fault
from klinic.rewards.json_values import json_columns
from klinic.rewards.parse_result import RewardFault, RewardValues, fault_at

MAX_REPLY_BYTES = 64_000_000  # bytes; three times a million numbers


class SubprocessLostError(RewardFault):
    """The subprocess died before it replied."""


class SubprocessTimeoutError(SubprocessLostError):
    """The subprocess exceeded the time limit and was killed."""


class SubprocessExitedError(SubprocessLostError):
    """The subprocess exited by itself."""


class RewardSubprocess:
    """A running reward subprocess."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: a json.py in the working directory must not shadow the standard library
            [sys.executable, "-P", "-m", "klinic.rewards.subprocess_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        # also kills it at interpreter exit
        self.kill = weakref.finalize(self, _kill_group, self._process, os.getpid())
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe
        assert self._process.stdout is not None  # noqa: S101
        self._into, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)

    @property
    def is_alive(self) -> bool:
        """Whether it accepts requests: it has not been killed."""
        return self.kill.alive

    def send_request(self, request: dict[str, Any], *, seconds: int | float) -> dict[str, Any]:
        """Return the reply; without one, kill the process and raise `SubprocessLostError`."""
        data = json.dumps(request).encode() + b"\n"
        try:
            line = self._exchange_bytes(data, time.monotonic() + seconds)
            answer: dict[str, Any] = json.loads(line)
        except TimeoutError:
            self.kill()
            raise SubprocessTimeoutError(f"did not return within {seconds:g} s") from None
        except (EOFError, OSError, ValueError):
            self.kill()
            raise SubprocessExitedError(
                f"ended its process ({_describe_exit(self._process.returncode)})"
            ) from None
        return answer

    def _exchange_bytes(self, request: bytes, deadline: float) -> bytes:
        """Write and read without blocking, so that a full pipe cannot exceed the deadline."""
        left, reply = memoryview(request), bytearray()
        with selectors.DefaultSelector() as pipes:
            pipes.register(self._into, selectors.EVENT_WRITE)
            pipes.register(self._from, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                ready = {key.fd for key, _ in pipes.select(max(0.0, deadline - time.monotonic()))}
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if self._from in ready:
                    reply += _read_chunk(self._from, len(reply))
                if self._into in ready:
                    left = left[os.write(self._into, left) :]
                    if not left:
                        pipes.unregister(self._into)
        return bytes(reply)


def _read_chunk(file: int, already: int) -> bytes:
    data = os.read(file, 1 << 16)
    if not data:
        raise EOFError
    if already > MAX_REPLY_BYTES:
        raise ValueError("the reply is too long")
    return data


def _kill_group(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:  # a forked child exits: it must not kill its parent's worker
        return
    with suppress(ProcessLookupError, PermissionError):  # already gone
        # before `wait`: until then its pid cannot be reused
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _describe_exit(code: int) -> str:
    """Describe an exit code.

    >>> _describe_exit(3), _describe_exit(-11)
    ('exit code 3', 'signal 11: Segmentation fault')
    """
    return f"exit code {code}" if code >= 0 else f"signal {-code}: {signal.strsignal(-code)}"


START_TIMEOUT = 60.0  # seconds for the import of user code, or the time limit if that is longer
MAX_LOST_IN_A_ROW = 8  # consecutive single completions (of different prompts) lost before giving up


class SubprocessReward:
    """A reward function in a subprocess. Completions on which it hangs or crashes get no reward."""

    def __init__(self, target: str, *, timeout: int | float) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout is {timeout}: it must be a positive number of seconds.")
        module_path, _, self.__name__ = target.rpartition(":")
        # absolute: the run may change the working directory
        self._target = (
            f"{Path(module_path).resolve()}:{self.__name__}" if _is_file(module_path) else target
        )
        self._timeout = timeout
        self._process: RewardSubprocess | None = None
        self._ensure_started()  # eagerly: an unknown function fails before the run

    def __call__(self, **given: list[Any]) -> RewardValues:
        """Return one number per completion; None where the function failed again on retry."""
        columns = json_columns(given)
        call = RewardCall(function=self, kwargs=columns, num=len(columns["completions"]))
        try:
            return self._request_values(call)
        except SubprocessLostError:
            return self._score_one_by_one(call)
        except RewardFault as fault:
            raise locate_fault(fault, call, self._request_values) from None

    def close(self) -> None:
        """End the process; the next call starts a new one."""
        if self._process is not None:
            self._process.kill()

    def _score_one_by_one(self, call: RewardCall) -> RewardValues:
        values: list[float | None] = [None] * call.num
        lost: Counter[str] = Counter()
        for tried, index in enumerate(_interleave_prompts(call.kwargs["prompts"]), 1):
            try:
                (values[index],) = self._request_values(call.select_range(index, index + 1))
            except SubprocessLostError as error:
                lost["timeouts" if isinstance(error, SubprocessTimeoutError) else "crashed"] += 1
                if lost.total() == tried == min(MAX_LOST_IN_A_ROW, call.num):
                    raise RewardFault(
                        f"{error.what} on each of {tried} completions given to it one by one",
                        0,
                        "Fix it, or raise its timeout.",
                    ) from None
            except RewardFault as fault:
                raise fault_at(fault, index) from None
        return RewardValues(values, **lost)

    def _request_values(self, call: RewardCall) -> RewardValues:
        request = {"given": call.kwargs, "num": call.num}
        answer = self._ensure_started().send_request(request, seconds=self._timeout)
        if "fault" in answer:
            raise RewardFault(*answer["fault"])
        if "refused" in answer:
            raise RewardError(answer["refused"])
        return RewardValues(answer["values"], **answer["lost"])

    def _ensure_started(self) -> RewardSubprocess:
        if self._process is None or not self._process.is_alive:
            self._process = RewardSubprocess()
            seconds = max(START_TIMEOUT, self._timeout)
            try:
                request = {"target": self._target, "path": sys.path}
                answer = self._process.send_request(request, seconds=seconds)
            except SubprocessLostError as error:
                raise FunctionError(
                    f"{self._target} {error.what} during import. Make it faster to import."
                ) from None
            if "refused" in answer:
                self._process.kill()
                raise FunctionError(answer["refused"])
        return self._process


def killable(function: str | Callable[..., Any], *, timeout: int | float) -> SubprocessReward:
    """Return a reward function that runs in a subprocess, for `reward_funcs`.

    `function` is `file.py:function`, `module:function`, or an importable function: only its name is
    sent to the subprocess. `timeout` is in seconds, for one call with all completions of a step.
    """
    return SubprocessReward(
        function if isinstance(function, str) else import_name(function), timeout=timeout
    )


def import_name(function: Callable[..., Any]) -> str:
    """Return `module:function` of an importable function; raise FunctionError for others.

    >>> import json
    >>> import_name(json.dumps)
    'json:dumps'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    if module != "__main__" and getattr(sys.modules.get(str(module)), str(name), None) is function:
        return f"{module}:{name}"
    raise FunctionError(
        f"{name or function!r} of {module} cannot run in a subprocess, which imports it by name: "
        "it is defined inside a function, in a notebook or in the main script. Move it to a module "
        "of its own and import it, or pass `file.py:function`."
    )


def _is_file(module_path: str) -> bool:
    return module_path.endswith(".py")


def _interleave_prompts(prompts: Sequence[Any]) -> list[int]:
    """Return indices in an order that visits every prompt once before any twice.

    >>> _interleave_prompts(["a", "a", "b", "b"])
    [0, 2, 1, 3]
    """
    counts: Counter[str] = Counter()
    turns = []
    for prompt in prompts:
        turns.append(counts[str(prompt)])
        counts[str(prompt)] += 1
    return sorted(range(len(turns)), key=turns.__getitem__)
