"""Numbers out of whatever a reward function returned, or a sentence that says what it returned."""

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
    """One number or None a completion, and why numbers are missing: `timeouts`, for example."""

    def __init__(self, values: Iterable[float | None] = (), **lost: int) -> None:
        super().__init__(values)
        self.lost = lost
        """Completions without a number, by the misfortune that took it."""


def as_values(result: Any, num: int) -> Values:
    """Return what a function returned as `num` numbers or Nones.

    Runs the user's code where that is a generator.

    >>> as_values([True, 0.5, None], 3)
    [1.0, 0.5, None]
    """
    if isinstance(result, (*TEXT, *UNORDERED)) or not isinstance(result, Iterable):
        raise Fault(f"returned {_shown(result)}, not a list with one number or None a completion")
    values = list(islice(result, num + 1))  # a generator may have no end
    if len(values) != num:
        found = f"{len(values)}" if len(values) < num else _length(result)
        raise Fault(f"returned {found} values for {num} completions, so they cannot be told apart")
    numbers = (None if v is None else _number(v, index) for index, v in enumerate(values))
    return Values(numbers, **(result.lost if isinstance(result, Values) else {}))


def _number(value: Any, index: int) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real):
            return float(plain)
    except OverflowError:  # a whole number beyond the largest float
        return math.inf
    except (ValueError, RuntimeError, TypeError):
        pass  # an array of several is no number either
    raise Fault(f"returned {_shown(value)}, which is no number and not None", index)


def _length(result: Any) -> str:
    return str(len(result)) if isinstance(result, Sized) else "more"


def _shown(value: Any) -> str:
    try:
        text = brief(value)
    except Exception:  # a user's code, and a whole number of too many digits
        text = "a value without a text"
    return f"{text} ({type(value).__name__})"
