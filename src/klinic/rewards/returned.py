"""Validates the values that a reward function returned."""

import math
from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from numbers import Real
from reprlib import repr as brief
from typing import Any

from klinic.rewards.fault import Fault

UNORDERED = (Mapping, Set)
TEXT = (str, bytes, bytearray)


class Values(list[float | None]):
    """One number or None per completion, and counts of lost ones by reason (`timeouts`)."""

    def __init__(self, values: Iterable[float | None] = (), **lost: int) -> None:
        super().__init__(values)
        self.lost = lost
        """Number of completions without a value, by reason."""


def as_values(result: Any, num: int) -> Values:
    """Convert a function's result to `num` numbers or Nones; raise a fault otherwise.

    A generator runs user code here.

    >>> as_values([True, 0.5, None], 3)
    [1.0, 0.5, None]
    """
    if isinstance(result, (*TEXT, *UNORDERED)) or not isinstance(result, Iterable):
        raise Fault(f"returned {_shown(result)}, not a list with one number or None per completion")
    values = list(islice(result, num + 1))  # a generator may be infinite
    if len(values) != num:
        found = f"{len(values)}" if len(values) < num else _length(result)
        raise Fault(f"returned {found} values for {num} completions, so they cannot be matched")
    numbers = (None if v is None else _number(v, index) for index, v in enumerate(values))
    return Values(numbers, **(result.lost if isinstance(result, Values) else {}))


def _number(value: Any, index: int) -> float:
    """Convert a Python, NumPy or torch number to a float."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real):
            return float(plain)
    except OverflowError:  # an integer above the largest float
        return math.inf
    except (ValueError, RuntimeError, TypeError):
        pass  # an array with several elements
    raise Fault(f"returned {_shown(value)}, which is neither a number nor None", index)


def _length(result: Any) -> str:
    return str(len(result)) if isinstance(result, Sized) else "more"


def _shown(value: Any) -> str:
    try:
        text = brief(value)
    except Exception:  # user code; an integer with too many digits
        text = "a value without a text"
    return f"{text} ({type(value).__name__})"
