"""Runs a reward function in a subprocess with a time limit, so that it may hang or crash."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from klinic.errors import ConfigError, FunctionError, RewardError
from klinic.rewards.calling import Call, located
from klinic.rewards.fault import Fault, at
from klinic.rewards.plain import plain_columns
from klinic.rewards.process import Hung, Lost, Process
from klinic.rewards.returned import Values

TO_START = 60.0  # seconds for the import of user code, or the time limit if that is longer
ENOUGH = 8  # consecutive single completions (of different prompts) lost before giving up


class Killable:
    """A reward function in a subprocess. Completions on which it hangs or crashes get no reward."""

    def __init__(self, target: str, *, timeout: int | float) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout is {timeout}: it must be a positive number of seconds.")
        place, _, self.__name__ = target.rpartition(":")
        # absolute: the run may change the working directory
        self._target = f"{Path(place).resolve()}:{self.__name__}" if _is_file(place) else target
        self._timeout = timeout
        self._process: Process | None = None
        self._started()  # eagerly: an unknown function fails before the run

    def __call__(self, **given: list[Any]) -> Values:
        """Return one number per completion; None where the function failed again on retry."""
        columns = plain_columns(given)
        call = Call(function=self, given=columns, num=len(columns["completions"]))
        try:
            return self._ask(call)
        except Lost:
            return self._one_by_one(call)
        except Fault as fault:
            raise located(fault, call, self._ask) from None

    def close(self) -> None:
        """End the process; the next call starts a new one."""
        if self._process is not None:
            self._process.kill()

    def _one_by_one(self, call: Call) -> Values:
        values: list[float | None] = [None] * call.num
        lost: Counter[str] = Counter()
        for tried, index in enumerate(_spread(call.given["prompts"]), 1):
            try:
                (values[index],) = self._ask(call.part(index, index + 1))
            except Lost as error:
                lost["timeouts" if isinstance(error, Hung) else "crashed"] += 1
                if lost.total() == tried == min(ENOUGH, call.num):
                    raise Fault(
                        f"{error.what} on each of {tried} completions given to it one by one",
                        0,
                        "Fix it, or raise its timeout.",
                    ) from None
            except Fault as fault:
                raise at(fault, index) from None
        return Values(values, **lost)

    def _ask(self, call: Call) -> Values:
        request = {"given": call.given, "num": call.num}
        answer = self._started().ask(request, seconds=self._timeout)
        if "fault" in answer:
            raise Fault(*answer["fault"])
        if "refused" in answer:
            raise RewardError(answer["refused"])
        return Values(answer["values"], **answer["lost"])

    def _started(self) -> Process:
        if self._process is None or not self._process.alive:
            self._process = Process()
            seconds = max(TO_START, self._timeout)
            try:
                request = {"target": self._target, "path": sys.path}
                answer = self._process.ask(request, seconds=seconds)
            except Lost as error:
                raise FunctionError(
                    f"{self._target} {error.what} during import. Make it faster to import."
                ) from None
            if "refused" in answer:
                self._process.kill()
                raise FunctionError(answer["refused"])
        return self._process


def killable(function: str | Callable[..., Any], *, timeout: int | float) -> Killable:
    """Return a reward function that runs in a subprocess, for `reward_funcs`.

    `function` is `file.py:function`, `module:function`, or an importable function: only its name is
    sent to the subprocess. `timeout` is in seconds, for one call with all completions of a step.
    """
    return Killable(function if isinstance(function, str) else name_of(function), timeout=timeout)


def name_of(function: Callable[..., Any]) -> str:
    """Return `module:function` of an importable function; raise FunctionError for others.

    >>> import json
    >>> name_of(json.dumps)
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


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _spread(prompts: Sequence[Any]) -> list[int]:
    """Return indices in an order that visits every prompt once before any twice.

    >>> _spread(["a", "a", "b", "b"])
    [0, 2, 1, 3]
    """
    seen: Counter[str] = Counter()
    turns = []
    for prompt in prompts:
        turns.append(seen[str(prompt)])
        seen[str(prompt)] += 1
    return sorted(range(len(turns)), key=turns.__getitem__)
