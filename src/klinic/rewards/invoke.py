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
from klinic.rewards.parse_result import (
    RewardFault,
    RewardValues,
    describe_error,
    fault_at,
    parse_result,
)
from klinic.runtime.user_code import ExitCalled, guard_process

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """A reward function with its arguments for `num` completions."""

    function: Callable[..., Any]
    kwargs: dict[str, list[Any]]
    num: int
    name: str = "a reward"
    """Name in messages."""

    def select_range(self, low: int, high: int) -> "RewardCall":
        """Return the call for the completions from `low` to before `high`."""
        kwargs = {name: list(values[low:high]) for name, values in self.kwargs.items()}
        return RewardCall(function=self.function, kwargs=kwargs, num=high - low, name=self.name)


def invoke_all(calls: Sequence[RewardCall]) -> list[RewardValues | KlinicError]:
    """Return the values or the error of each call."""
    results = [_start_call(call) for call in calls]
    waiting = {i: result for i, result in enumerate(results) if inspect.isawaitable(result)}
    if waiting:
        for i, result in _await_results(waiting, calls).items():
            results[i] = result
    return [_parse_call_result(result, call) for result, call in zip(results, calls, strict=True)]


def invoke_one(call: RewardCall) -> RewardValues:
    """Return the values of one call; raise its error."""
    (result,) = invoke_all([call])
    if isinstance(result, KlinicError):
        raise result
    return result


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
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


def locate_fault(
    fault: RewardFault, call: RewardCall, try_call: Callable[[RewardCall], Any] = invoke_one
) -> RewardFault:
    """Return the fault with the index of the first completion that causes it alone.

    Bisects, so the calls see each completion at most twice in total. A fault that needs several
    completions keeps no index.
    """
    low, high = 0, call.num
    while fault.index is None and high - low > 1:
        middle = (low + high) // 2
        for start, end in ((low, middle), (middle, high)):
            new_fault = _call_fault(call.select_range(start, end), try_call)
            if new_fault is not None:
                low, high = start, end
                fault = (
                    new_fault
                    if new_fault.index is None
                    else fault_at(new_fault, start + new_fault.index)
                )
                break
        else:
            return fault
    return fault_at(fault, low) if fault.index is None and high > low else fault


def _call_fault(call: RewardCall, try_call: Callable[[RewardCall], Any]) -> RewardFault | None:
    try:
        try_call(call)
    except RewardFault as fault:
        return fault
    return None


def _start_call(call: RewardCall) -> Any:
    try:
        with guard_process(call.name):
            return call.function(**call.kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything
        return _error_of_exception(error)


def _await_results(
    waiting: Mapping[int, Awaitable[Any]], calls: Sequence[RewardCall]
) -> dict[int, Any]:
    """Return the results of async functions, awaited concurrently."""
    names = " or ".join(dict.fromkeys(calls[i].name for i in waiting))
    try:
        with guard_process(names):
            return dict(
                zip(waiting, run_coroutine(_gather_results(list(waiting.values()))), strict=True)
            )
    except FunctionError as error:  # one of them changed process state
        return dict.fromkeys(waiting, _error_of_exception(error))


async def _gather_results(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    import asyncio

    return await asyncio.gather(*map(_await_result, waiting))


async def _await_result(work: Awaitable[Any]) -> Any:
    import asyncio

    try:
        return await work
    except KeyboardInterrupt:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # cancelled by klinic, not by the function
            raise
        return _error_of_exception(error)
    except BaseException as error:  # as above
        return _error_of_exception(error)


def _parse_call_result(result: Any, call: RewardCall) -> RewardValues | KlinicError:
    if isinstance(result, KlinicError):
        return result
    try:
        with guard_process(call.name):  # a generator runs user code
            return parse_result(result, call.num)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _error_of_exception(error)


def _error_of_exception(error: BaseException) -> KlinicError:
    if isinstance(error, KlinicError):
        return error
    if isinstance(error, ExitCalled):
        return RewardFault(
            f"called {error}", advice="Return a value or raise: exiting would end the run."
        )
    fault = RewardFault(f"raised {describe_error(error)}")
    fault.__cause__ = error
    return fault
