"""Checks annotations while tests run: `jaxtyping.jaxtyped`, at a price that a suite can pay.

pytest's plugin of jaxtyping puts `jaxtyping.jaxtyped` around every function and record of klinic.
That makes both of its checks while a module is imported, and at each call binds the arguments,
opens a scope for the names of axes and checks the arguments twice. Here a check is made at the
first call, and where no annotation names an array, so that there are no axes to compare, it is
beartype's alone.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

ARRAYS_TOO = jaxtyping.jaxtyped
SAME_ERROR = BeartypeConf(violation_type=jaxtyping.TypeCheckError)


def install() -> None:
    """Check what is imported from now on in this way."""
    jaxtyping.jaxtyped = check_annotations  # type: ignore[assignment]


def check_annotations(checked: Any = None, *, typechecker: Any = None) -> Any:
    """Return a function, or a record, whose arguments and results are compared with its hints."""
    if checked is None:
        return functools.partial(check_annotations, typechecker=typechecker)
    if inspect.isclass(checked):
        if is_dataclass(checked) and inspect.isfunction(checked.__init__):
            checked.__init__ = _check_at_first_call(checked.__init__, typechecker)
        return checked
    if inspect.isfunction(checked):
        return _check_at_first_call(checked, typechecker)
    return ARRAYS_TOO(checked, typechecker=typechecker)


def _check_at_first_call(function: Any, typechecker: Any) -> Any:
    if hasattr(function, "checks_annotations"):  # an `__init__` of a parent
        return function
    check: Callable[..., Any] | None = None

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal check
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if check is None:
            check = _checking(function, typechecker)
        return check(*args, **kwargs)

    checked.checks_annotations = True  # type: ignore[attr-defined]
    return checked


def _checking(function: Any, typechecker: Any) -> Callable[..., Any]:
    if getattr(function, "__no_type_check__", False):
        return function  # type: ignore[no-any-return]
    hints = function.__annotations__.values()
    if any(_is_left_to_jaxtyping(hint) for hint in hints):
        return ARRAYS_TOO(function, typechecker=typechecker)  # type: ignore[no-any-return]
    return beartype(conf=SAME_ERROR)(function)  # type: ignore[no-any-return]


def _is_left_to_jaxtyping(hint: Any) -> bool:
    """Whether it names an array, or a name that may not exist while klinic runs."""
    if isinstance(hint, (str, typing.ForwardRef)):
        return True
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    if typing.get_origin(hint) is typing.Literal:  # its strings are values
        return False
    if isinstance(hint, list | tuple):  # the arguments of a Callable
        return any(map(_is_left_to_jaxtyping, hint))
    return any(map(_is_left_to_jaxtyping, typing.get_args(hint)))
