"""One reward function in a process of its own: `python -m klinic.rewards.worker`.

Requests come as lines of JSON on standard input, and each has one line of JSON for an answer. The
first names the function: {"target": ..., "path": [...]}. The others call it: {"given": {...},
"num": ...}.

Little is imported, since this process starts again after every time limit.
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
from klinic.rewards.calling import Call, call_one
from klinic.rewards.fault import Fault
from klinic.rewards.signature import wanted
from klinic.user_code import give_process

CUT_OFF = 70  # EX_SOFTWARE of sysexits.h


def main() -> None:
    """Answer requests until there are no more."""
    give_process()
    requests, replies = _private_pipes()
    _die_with_parent(requests)
    with open(requests, "rb", closefd=False) as lines:
        function = _Function()
        try:
            for line in lines:
                _write(replies, json.dumps(function.answer(json.loads(line))).encode() + b"\n")
        except OSError:  # a fork of this process, or a function that has closed the pipes
            os._exit(CUT_OFF)


class _Function:
    """The function, once a request has named it."""

    def __init__(self) -> None:
        self._name = ""
        self._function: Callable[..., Any] | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a request asks for, or what is wrong."""
        try:
            if self._function is None:
                return self._find(**request)
            return self._call(self._function, **request)
        except Fault as fault:
            return {"fault": [fault.what, fault.index, fault.advice]}
        except KlinicError as error:
            return {"refused": str(error)}

    def _find(self, target: str, path: list[str]) -> dict[str, Any]:
        sys.path[:] = path
        self._name = target.rpartition(":")[2]
        self._function = _finder()(target, example="my_rewards.py:correct")
        return {}

    def _call(
        self, function: Callable[..., Any], given: dict[str, list[Any]], num: int
    ) -> dict[str, Any]:
        own = wanted(self._name, function, given)
        call = Call(function=function, given=own, num=num, name=f"the reward {self._name}")
        values = call_one(call)
        return {"values": values, "lost": values.lost}


def _finder() -> Callable[..., Callable[..., Any]]:
    """Return klinic's `find_function` by its file: the package around it takes a second to load."""
    file = Path(__file__).parents[1] / "recipe" / "function.py"
    spec = importlib.util.spec_from_file_location("klinic_find_function", file)
    assert spec is not None  # noqa: S101 - the file is ours
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    finder: Callable[..., Callable[..., Any]] = module.find_function
    return finder


def _private_pipes() -> tuple[int, int]:
    """Take standard input and output away: what a function reads is empty, its words are errors."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _close_in_children(replies)
    return requests, replies


def _close_in_children(replies: int) -> None:
    """Keep a child that outlives this process from looking like an answer still to come."""
    inherited = [replies]

    def close() -> None:
        while inherited:  # once: in a child's child the number may be of another file
            os.close(inherited.pop())

    os.register_at_fork(after_in_child=close)


def _die_with_parent(requests: int) -> None:
    """Leave a process behind that ends this group when the pipe to klinic breaks.

    A thread could not: a function that hangs may hold the interpreter. It is no child of this
    process, so that a function may wait for all of its own.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    hangup = select.poll()
    hangup.register(requests, 0)  # nothing but the end of it
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


if __name__ == "__main__":
    main()
