"""A reward function that may hang or crash: it runs in a process of its own, with a time limit."""

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

TO_START = 60.0  # seconds that importing a user's file may take, or the time limit if that is more
ENOUGH = 8  # completions, one a prompt, that are lost alone before the function is given up


class Killable:
    """A reward function behind a pipe. What hangs or crashes it has no reward; the rest has."""

    def __init__(self, target: str, *, timeout: int | float) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout is {timeout}: nothing returns in that time. Give seconds.")
        place, _, self.__name__ = target.rpartition(":")
        # from here, where the recipe was read, and not from where the run may go
        self._target = f"{Path(place).resolve()}:{self.__name__}" if _is_file(place) else target
        self._timeout = timeout
        self._process: Process | None = None
        self._started()  # now, so that a name which is wrong is heard before the run

    def __call__(self, **given: list[Any]) -> Values:
        """Return one number a completion, None for those that it was lost on twice."""
        columns = plain_columns(given)
        call = Call(function=self, given=columns, num=len(columns["completions"]))
        try:
            return self._ask(call)
        except Lost:
            return self._one_by_one(call)
        except Fault as fault:
            raise located(fault, call, self._ask) from None

    def close(self) -> None:
        """End the process; the next call starts another."""
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
                        "Mend it, or give it more time.",
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
                    f"{self._target} {error.what} while it was imported. Make it quick to import."
                ) from None
            if "refused" in answer:
                self._process.kill()
                raise FunctionError(answer["refused"])
        return self._process


def killable(function: str | Callable[..., Any], *, timeout: int | float) -> Killable:
    """Return a reward function that runs in a process of its own, for `reward_funcs`.

    `function` is `file.py:function`, `module:function`, or a function that can be imported: only
    its name goes to the process. `timeout` is in seconds, for one call with all completions of a
    step.
    """
    return Killable(function if isinstance(function, str) else name_of(function), timeout=timeout)


def name_of(function: Callable[..., Any]) -> str:
    """Return `module:function` of a function, if that leads back to it.

    >>> import json
    >>> name_of(json.dumps)
    'json:dumps'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    if module != "__main__" and getattr(sys.modules.get(str(module)), str(name), None) is function:
        return f"{module}:{name}"
    raise FunctionError(
        f"{name or function!r} of {module} cannot run in a process of its own: only its name goes "
        "there, and this one is made inside a function, in a notebook or in the script that runs. "
        "Put it into a file of its own and import it, or give `file.py:function`."
    )


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _spread(prompts: Sequence[Any]) -> list[int]:
    """Return places in an order that asks about every prompt once before any twice.

    >>> _spread(["a", "a", "b", "b"])
    [0, 2, 1, 3]
    """
    seen: Counter[str] = Counter()
    turns = []
    for prompt in prompts:
        turns.append(seen[str(prompt)])
        seen[str(prompt)] += 1
    return sorted(range(len(turns)), key=turns.__getitem__)
