"""Selects the arguments of a reward function by its signature."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from klinic.errors import RewardError


def accepted_arguments(
    name: str, function: Callable[..., Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments that a function accepts.

    TRL passes every argument, so its functions end in `**kwargs`. A function without it gets only
    the arguments in its signature.

    >>> arguments = {"prompts": ["1+1="], "completions": ["2"]}
    >>> accepted_arguments("length", lambda completions: ..., arguments)
    {'completions': ['2']}
    """
    try:
        parameters = inspect.signature(function).parameters
    except Exception:  # no signature available
        return kwargs
    _check_signature(name, parameters, kwargs)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {key: values for key, values in kwargs.items() if key in parameters}


def _check_signature(
    name: str, parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]
) -> None:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p for p in parameters.values() if p.default is p.empty]
    for parameter in needed:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"the reward {name} takes {parameter.name!r} by position only, but reward "
                "functions are called by keyword. Remove the `/` from its signature."
            )
        if parameter.kind in by_name and parameter.name not in kwargs:
            raise RewardError(
                f"the reward {name} requires {parameter.name!r}, which is not a column of the "
                f"dataset. Available: {', '.join(kwargs)}. Rename the argument or the column, or "
                "give the argument a default."
            )
