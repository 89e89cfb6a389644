"""Checks annotations while tests run: `jaxtyping.jaxtyped`, at a price that a suite can pay.

pytest's plugin of jaxtyping puts `jaxtyping.jaxtyped` around every function and record of klinic.
That makes both of its checks while a module is imported, and at each call binds the arguments,
opens a scope for the names of axes and checks the arguments twice. Here a check is made at the
first call, and it is beartype's alone, once for each value: within a scope of its own where an
annotation names an array, so that axes are compared. Hints that are strings are left to jaxtyping.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

BY_JAXTYPING = jaxtyping.jaxtyped
SCOPE = BY_JAXTYPING("context")
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
    return BY_JAXTYPING(checked, typechecker=typechecker)


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
    hints = list(function.__annotations__.values())
    if any(_contains(_is_string, hint) for hint in hints):
        return BY_JAXTYPING(function, typechecker=typechecker)  # type: ignore[no-any-return]
    has_arrays = any(_contains(_is_array, hint) for hint in hints)
    if has_arrays and inspect.isgeneratorfunction(function):  # its scope would have ended
        return BY_JAXTYPING(function, typechecker=typechecker)  # type: ignore[no-any-return]
    check = beartype(conf=SAME_ERROR)(function)
    return _in_a_scope(check) if has_arrays else check


def _in_a_scope(check: Callable[..., Any]) -> Callable[..., Any]:
    """Compare the names of axes among the arguments and the result of one call."""

    def scoped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with SCOPE:
            return check(*args, **kwargs)

    return scoped


def _is_string(hint: Any) -> bool:
    """Whether it is a name that may not exist while klinic runs, or of the size of an axis."""
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return "{" in hint.dim_str  # the value of an argument
    return isinstance(hint, str | typing.ForwardRef)


def _is_array(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)


def _contains(is_wanted: Callable[[Any], bool], hint: Any) -> bool:
    """Whether a hint, or a part of it, is wanted."""
    if is_wanted(hint):
        return True
    if typing.get_origin(hint) is typing.Literal:  # its strings are values
        return False
    # a list has the arguments of a Callable
    parts = hint if isinstance(hint, list | tuple) else typing.get_args(hint)
    return any(_contains(is_wanted, part) for part in parts)
