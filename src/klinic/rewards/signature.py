"""Which arguments a reward function is given: all, or those of them that it names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from klinic.errors import RewardError


def wanted(name: str, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return what a function takes of what it can be given.

    TRL hands everything to every function, so its functions end in `**kwargs`. One that does not is
    given the arguments it names.

    >>> wanted("length", lambda completions: ..., {"prompts": ["1+1="], "completions": ["2"]})
    {'completions': ['2']}
    """
    try:
        parameters = inspect.signature(function).parameters
    except Exception:  # it does not say what it takes, or what it runs to say so fails
        return given
    _refuse_unknown(name, parameters, given)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {key: values for key, values in given.items() if key in parameters}


def _refuse_unknown(
    name: str, parameters: Mapping[str, inspect.Parameter], given: dict[str, Any]
) -> None:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p for p in parameters.values() if p.default is p.empty]
    for parameter in needed:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"the reward {name} takes {parameter.name!r} by position only, and reward "
                "functions are called by keyword. Remove the `/` from its arguments."
            )
        if parameter.kind in by_name and parameter.name not in given:
            raise RewardError(
                f"the reward {name} asks for {parameter.name!r}, which is no column of the "
                f"dataset. It can be given: {', '.join(given)}. Rename the argument or the "
                "column, or give the argument a default."
            )
