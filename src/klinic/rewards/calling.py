"""Call reward functions, the asynchronous ones at the same time, and find what broke one.

A function in a process of its own is called by the same code. So nothing here needs NumPy, and
asyncio, which takes longer to import than all else there, is imported where something is awaited.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from klinic.errors import KlinicError
from klinic.rewards.fault import Fault, at, described
from klinic.rewards.returned import Values, as_values

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A reward function with its arguments for `num` completions."""

    function: Callable[..., Any]
    given: dict[str, list[Any]]
    num: int

    def part(self, low: int, high: int) -> "Call":
        """Return the call for the completions from `low` to before `high`."""
        given = {name: list(values[low:high]) for name, values in self.given.items()}
        return Call(function=self.function, given=given, num=high - low)


def call_all(calls: Sequence[Call]) -> list[Values | KlinicError]:
    """Return what each function gave, or what was wrong with it."""
    results = [_started(call) for call in calls]
    waiting = {i: result for i, result in enumerate(results) if inspect.isawaitable(result)}
    if waiting:
        finished = run(_finished(list(waiting.values())))
        for i, result in zip(waiting, finished, strict=True):
            results[i] = result
    return [_judged(result, call.num) for result, call in zip(results, calls, strict=True)]


def call_one(call: Call) -> Values:
    """Return what one function gave; raises where it gave nothing that can be used."""
    (result,) = call_all([call])
    if isinstance(result, KlinicError):
        raise result
    return result


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, also where an event loop runs already (as in Jupyter)."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with closing(work):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, work).result()


def located(fault: Fault, call: Call, try_call: Callable[[Call], Any] = call_one) -> Fault:
    """Return the fault with the first completion that causes it alone.

    Halves what is left at each turn, so all calls together see each completion twice at most. A
    fault that needs several completions at once stays without a place.
    """
    low, high = 0, call.num
    while fault.index is None and high - low > 1:
        middle = (low + high) // 2
        for start, end in ((low, middle), (middle, high)):
            found = _fault(call.part(start, end), try_call)
            if found is not None:
                low, high = start, end
                fault = found if found.index is None else at(found, start + found.index)
                break
        else:
            return fault
    return at(fault, low) if fault.index is None and high > low else fault


def _fault(call: Call, try_call: Callable[[Call], Any]) -> Fault | None:
    try:
        try_call(call)
    except Fault as fault:
        return fault
    return None


def _started(call: Call) -> Any:
    try:
        return call.function(**call.given)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        return _raised(error)


async def _finished(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    import asyncio

    return await asyncio.gather(*map(_awaited, waiting))


async def _awaited(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except (Exception, SystemExit) as error:  # as above
        return _raised(error)


def _judged(result: Any, num: int) -> Values | KlinicError:
    if isinstance(result, KlinicError):
        return result
    try:
        return as_values(result, num)
    except (Exception, SystemExit) as error:  # a generator is a user's code as well
        return _raised(error)


def _raised(error: BaseException) -> KlinicError:
    if isinstance(error, KlinicError):
        return error
    fault = Fault(f"raised {described(error)}")
    fault.__cause__ = error
    return fault
