"""Parses numbers of journal entries: JSON allows integers of any size, and any type."""

import math
from typing import Any

LARGEST_STEP = 10**9
"""More steps than any run makes; plots and arrays cannot hold larger integers."""


def as_number(value: Any) -> float | None:
    """Return a number as a float, infinity if it overflows; None for any other type.

    >>> as_number(3), as_number(-(10**400)), as_number("3")
    (3.0, -inf, None)
    """
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_step(value: Any) -> int | None:
    """Return a valid step number, or None.

    >>> as_step(7), as_step(True), as_step(-1), as_step(10**30)
    (7, None, None, None)
    """
    if type(value) is not int or not 0 <= value <= LARGEST_STEP:
        return None
    return value
