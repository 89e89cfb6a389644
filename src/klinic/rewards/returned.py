"""Numbers out of whatever a reward function returned, or a sentence that says what it returned."""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from numbers import Real
from reprlib import repr as brief
from typing import Any

import numpy as np
from jaxtyping import Float64

from klinic.errors import RewardError

UNORDERED = (Mapping, Set)
TEXT = (str, bytes, bytearray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The numbers of one function over the completions of a step."""

    values: Float64[np.ndarray, "B"]
    """NaN where it gave none, or one that is not finite."""
    num_nonfinite: int
    """How many of its numbers were NaN or infinite."""


def as_list(name: str, result: Any, num: int) -> list[Any]:
    """Return what a function returned as a list of `num` things.

    Runs the user's code where that is a generator.
    """
    if isinstance(result, (*TEXT, *UNORDERED)) or not isinstance(result, Iterable):
        raise RewardError(
            f"the reward {name} returned {_described(result)}, not a list. Return a list with one "
            "number, or None, a completion."
        )
    values = list(result)
    if len(values) != num:
        raise RewardError(
            f"the reward {name} returned {len(values)} values for {num} completions, so they "
            "cannot be told apart. Return one a completion, in their order, and None where there "
            "is none to give."
        )
    return values


def as_numbers(name: str, values: list[Any]) -> Returned:
    """Return the values as numbers; None, NaN and infinities as NaN.

    >>> as_numbers("length", [True, 0.5, None, float("inf")])
    Returned(values=array([1. , 0.5, nan, nan]), num_nonfinite=1)
    """
    numbers = [math.nan if value is None else _number(name, value) for value in values]
    given = np.array([value is not None for value in values], np.bool_)
    array = np.array(numbers, np.float64)
    finite = np.isfinite(array)
    return Returned(
        values=np.where(finite, array, np.nan), num_nonfinite=int((given & ~finite).sum())
    )


def _number(name: str, value: Any) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real):
            return float(plain)
    except (ValueError, RuntimeError, TypeError, OverflowError):
        pass  # an array of several, or too large: no number either way
    raise RewardError(
        f"the reward {name} returned {_described(value)} for a completion. Return a number for "
        "each, or None."
    )


def _described(value: Any) -> str:
    return f"{brief(value)} ({type(value).__name__})"
