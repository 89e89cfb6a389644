"""The child side of a reward subprocess: `python -m klinic.rewards.subprocess_worker`.

Reads requests as JSON lines on stdin and writes one JSON line per reply. The first request names
the function: {"target": ..., "path": [...]}. The others call it: {"given": {...}, "num": ...}.

It imports little, because it restarts after every timeout.
"""

import importlib.util
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from klinic.errors import KlinicError
from klinic.rewards.invoke import RewardCall, invoke_one
from klinic.rewards.parse_result import RewardFault
from klinic.rewards.signature import accepted_arguments
from klinic.runtime.user_code import disable_guard

EXIT_PIPE_LOST = 70  # EX_SOFTWARE of sysexits.h


def main() -> None:
    """Serve requests until stdin closes."""
    disable_guard()
    requests, replies = _private_pipes()
    _die_with_parent(requests)
    with open(requests, "rb", closefd=False) as lines:
        function = _FunctionServer()
        try:
            for line in lines:
                _write_all(
                    replies, json.dumps(function.handle_request(json.loads(line))).encode() + b"\n"
                )
        except OSError:  # a forked child, or the function closed the pipes
            os._exit(EXIT_PIPE_LOST)


class _FunctionServer:
    """Loads the function named by the first request, and calls it for the others."""

    def __init__(self) -> None:
        self._name = ""
        self._function: Callable[..., Any] | None = None

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request: values, a fault or a refusal."""
        try:
            if self._function is None:
                return self._load_function(**request)
            return self._call_function(self._function, **request)
        except RewardFault as fault:
            return {"fault": [fault.what, fault.index, fault.advice]}
        except KlinicError as error:
            return {"refused": str(error)}

    def _load_function(self, target: str, path: list[str]) -> dict[str, Any]:
        sys.path[:] = path
        self._name = target.rpartition(":")[2]
        self._function = _load_find_function()(target, example="my_rewards.py:correct")
        return {}

    def _call_function(
        self, function: Callable[..., Any], given: dict[str, list[Any]], num: int
    ) -> dict[str, Any]:
        own = accepted_arguments(self._name, function, given)
        call = RewardCall(function=function, kwargs=own, num=num, name=f"the reward {self._name}")
        values = invoke_one(call)
        return {"values": values, "lost": values.lost}


def _load_find_function() -> Callable[..., Callable[..., Any]]:
    """Load `find_function` from its file: importing its package takes a second."""
    file = Path(__file__).parents[1] / "recipe" / "function.py"
    spec = importlib.util.spec_from_file_location("klinic_find_function", file)
    assert spec is not None  # noqa: S101 - part of klinic
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    finder: Callable[..., Callable[..., Any]] = module.find_function
    return finder


def _private_pipes() -> tuple[int, int]:
    """Move the pipes off stdin and stdout: user code reads nothing, and prints to stderr."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _close_in_children(replies)
    return requests, replies


def _close_in_children(replies: int) -> None:
    """Close the reply pipe in forked children: a survivor would keep it open."""
    inherited = [replies]

    def close() -> None:
        while inherited:  # once: in a grandchild the descriptor may belong to another file
            os.close(inherited.pop())

    os.register_at_fork(after_in_child=close)


def _die_with_parent(requests: int) -> None:
    """Fork a watchdog that kills this process group when the pipe to klinic breaks.

    A thread cannot do it: a hanging function may hold the GIL. The watchdog is a grandchild, so
    that user code may wait for all of its own children.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    hangup = select.poll()
    hangup.register(requests, 0)  # hang-up events only
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


if __name__ == "__main__":
    main()
