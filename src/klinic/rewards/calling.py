"""Calls reward functions, async ones concurrently, and locates the completion that fails.

The subprocess worker uses this module too and must start fast, so it does not import NumPy, and
imports asyncio only when a result is awaitable.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from klinic.errors import FunctionError, KlinicError
from klinic.rewards.fault import Fault, at, described
from klinic.rewards.returned import Values, as_values
from klinic.user_code import ExitCalled, guard

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A reward function with its arguments for `num` completions."""

    function: Callable[..., Any]
    given: dict[str, list[Any]]
    num: int
    name: str = "a reward"
    """Name in messages."""

    def part(self, low: int, high: int) -> "Call":
        """Return the call for the completions from `low` to before `high`."""
        given = {name: list(values[low:high]) for name, values in self.given.items()}
        return Call(function=self.function, given=given, num=high - low, name=self.name)


def call_all(calls: Sequence[Call]) -> list[Values | KlinicError]:
    """Return the values or the error of each call."""
    results = [_started(call) for call in calls]
    waiting = {i: result for i, result in enumerate(results) if inspect.isawaitable(result)}
    if waiting:
        for i, result in _finished(waiting, calls).items():
            results[i] = result
    return [_judged(result, call) for result, call in zip(results, calls, strict=True)]


def call_one(call: Call) -> Values:
    """Return the values of one call; raise its error."""
    (result,) = call_all([call])
    if isinstance(result, KlinicError):
        raise result
    return result


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, also inside a running event loop (Jupyter)."""
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
    """Return the fault with the index of the first completion that causes it alone.

    Bisects, so the calls see each completion at most twice in total. A fault that needs several
    completions keeps no index.
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
        with guard(call.name):
            return call.function(**call.given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything
        return _raised(error)


def _finished(waiting: Mapping[int, Awaitable[Any]], calls: Sequence[Call]) -> dict[int, Any]:
    """Return the results of async functions, awaited concurrently."""
    names = " or ".join(dict.fromkeys(calls[i].name for i in waiting))
    try:
        with guard(names):
            return dict(zip(waiting, run(_gathered(list(waiting.values()))), strict=True))
    except FunctionError as error:  # one of them changed process state
        return dict.fromkeys(waiting, _raised(error))


async def _gathered(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    import asyncio

    return await asyncio.gather(*map(_awaited, waiting))


async def _awaited(work: Awaitable[Any]) -> Any:
    import asyncio

    try:
        return await work
    except KeyboardInterrupt:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # cancelled by klinic, not by the function
            raise
        return _raised(error)
    except BaseException as error:  # as above
        return _raised(error)


def _judged(result: Any, call: Call) -> Values | KlinicError:
    if isinstance(result, KlinicError):
        return result
    try:
        with guard(call.name):  # a generator runs user code
            return as_values(result, call.num)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> KlinicError:
    if isinstance(error, KlinicError):
        return error
    if isinstance(error, ExitCalled):
        return Fault(
            f"called {error}", advice="Return a value or raise: exiting would end the run."
        )
    fault = Fault(f"raised {described(error)}")
    fault.__cause__ = error
    return fault
