"""Converts columns to JSON values, for rewards outside this process."""

import math
from collections.abc import Mapping
from typing import Any

from klinic.rewards.fault import Fault

PLAIN = (str, int, float, bool, type(None))


def plain_columns(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Convert arguments to JSON values; raise a fault that names the column which has others."""
    return {
        name: [_plain_entry(value, name, index) for index, value in enumerate(values)]
        for name, values in given.items()
    }


def _plain_entry(value: Any, name: str, index: int) -> Any:
    try:
        return plain(value)
    except TypeError as error:
        raise Fault(
            f"cannot receive the column {name!r}, which holds {error}: it runs outside this "
            "process, and JSON has no such type",
            index,
            "Convert it to text or a number in the dataset, or run the function in this process.",
        ) from error


def plain(value: Any) -> Any:
    """Convert a value to lists, dictionaries, text and numbers; TypeError names other types.

    >>> plain({"moves": ("e4", 1), "clock": 0.5})
    {'moves': ['e4', 1], 'clock': 0.5}
    >>> plain([b"e4"])
    Traceback (most recent call last):
    TypeError: bytes
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("keys that are not text")
        return {key: plain(inner) for key, inner in value.items()}
    if getattr(value, "ndim", None) == 0:  # a NumPy or torch scalar
        return plain(value.item())
    raise TypeError(type(value).__name__)


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities by null: only Python's JSON has them.

    >>> without_nan({"price": [1.0, float("nan")]})
    {'price': [1.0, None]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return value
