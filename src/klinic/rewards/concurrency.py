"""Turns a function of one completion into a reward function: concurrent, with retries."""

import asyncio
import inspect
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from klinic.errors import ConfigError, KlinicError
from klinic.rewards.parse_result import RewardFault, RewardValues, describe_error, parse_result
from klinic.rewards.signature import accepted_arguments

FIRST_BACKOFF = 0.5  # seconds before the first retry; doubles with each retry
MAX_BACKOFF = 60.0
JITTER = random.Random()  # noqa: S311 - spreads requests; leaves the global RNG unchanged

Judge = Callable[..., Any]
JudgeCall = Callable[[int], Awaitable[Any]]


class RetryLater(Exception):  # noqa: N818 - a control signal, not an error
    """Raised to request a retry after at least `seconds`."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.seconds = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Concurrency, retries and timeout of calls."""

    concurrency: int = 8
    retries: int = 2
    """Attempts after the first."""
    timeout: int | float = 30
    """Seconds per attempt."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("concurrency", self.concurrency, 1),
            ("retries", self.retries, 0),
            ("timeout", self.timeout, 1e-3),
        ):
            if not value >= least:
                raise ConfigError(f"{name} is {value}: no call could succeed. Use {least} or more.")


def per_completion(
    *, concurrency: int = 8, retries: int = 2, timeout: int | float = 30
) -> Callable[[Judge], Callable[..., Awaitable[RewardValues]]]:
    """Decorator: turn a function that judges one completion into a reward function.

    The function takes `prompt`, `completion` and the columns of the row, may be `async`, and
    returns a number or None. At most `concurrency` calls run at once. A call that raises or exceeds
    `timeout` seconds is retried `retries` times with exponential back-off; then the completion has
    no reward. A function that is not `async` runs in threads; a hanging thread cannot be killed.

    >>> @per_completion(concurrency=2)
    ... async def short(completion):
    ...     return 1.0 / len(completion)
    >>> asyncio.run(short(prompts=["1+1=", "1+1="], completions=["2", "22"]))
    [1.0, 0.5]
    """
    limits = CallLimits(concurrency=concurrency, retries=retries, timeout=timeout)

    def decorate(judge: Judge) -> Callable[..., Awaitable[RewardValues]]:
        name = getattr(judge, "__name__", type(judge).__name__)

        async def reward(
            prompts: list[Any], completions: list[Any], **columns: list[Any]
        ) -> RewardValues:
            row_columns = {"prompt": prompts, "completion": completions, **columns}

            async def judge_one(index: int) -> Any:
                own = accepted_arguments(
                    name, judge, {key: values[index] for key, values in row_columns.items()}
                )
                if inspect.iscoroutinefunction(judge):
                    return await judge(**own)
                result = await _call_in_thread(judge, own)
                return await result if inspect.isawaitable(result) else result

            return await call_judges(judge_one, len(completions), limits)

        reward.__name__ = reward.__qualname__ = name
        reward.__module__, reward.__doc__ = judge.__module__, judge.__doc__
        return reward

    return decorate


async def call_judges(judge_call: JudgeCall, num: int, limits: CallLimits) -> RewardValues:
    """Return the values of `num` completions in order; None where all attempts failed."""
    gate = asyncio.Semaphore(limits.concurrency)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_call_with_retries(judge_call, i, gate, limits))
                for i in range(num)
            ]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several.exceptions[0].__cause__
    answers = [task.result() for task in tasks]
    failed = [answer for answer in answers if isinstance(answer, _FailedCall)]
    if failed and len(failed) == num:
        tries = f"{limits.retries + 1} tries" if limits.retries else "one try"
        raise RewardFault(
            f"failed on all of {num} completions in {tries} each, the last time with "
            f"{failed[-1].what}",
            0,
            "Fix the function, or the service that it calls.",
        )
    values = [None if isinstance(answer, _FailedCall) else answer for answer in answers]
    return RewardValues(parse_result(values, num), failed=len(failed))


@dataclass(frozen=True, slots=True)
class _FailedCall:
    what: str


async def _call_with_retries(
    judge_call: JudgeCall, index: int, gate: asyncio.Semaphore, limits: CallLimits
) -> Any:
    async with gate:
        for tries in range(limits.retries + 1):
            try:
                return await _with_timeout(judge_call(index), limits.timeout)
            except KlinicError:
                raise
            except (Exception, SystemExit) as error:  # user code may raise anything
                what = describe_error(error) if not isinstance(error, RetryLater) else str(error)
                least = error.seconds if isinstance(error, RetryLater) else 0.0
            if tries < limits.retries:
                await asyncio.sleep(_backoff_seconds(tries, least))
    return _FailedCall(what)


async def _with_timeout(work: Awaitable[Any], seconds: int | float) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise RetryLater(f"no answer within {seconds:g} s") from None
        raise


def _backoff_seconds(tries: int, least: float) -> float:
    """Return the back-off in seconds before the next attempt: exponential, with jitter."""
    backoff = FIRST_BACKOFF * 2.0**tries * JITTER.uniform(0.5, 1.5)
    return min(max(backoff, least), MAX_BACKOFF)


async def _call_in_thread(function: Judge, arguments: dict[str, Any]) -> Any:
    """Call a function in a daemon thread, which is abandoned if it hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # timed out
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(**arguments)
        except Exception as raised:  # passed to the awaiting task
            error = raised
        except BaseException as raised:
            error = RuntimeError(describe_error(raised))
        with suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await done
