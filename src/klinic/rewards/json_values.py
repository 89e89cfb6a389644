"""Converts columns to JSON values, for rewards outside this process."""

import math
from collections.abc import Mapping
from typing import Any

from klinic.rewards.parse_result import RewardFault

JSON_SCALARS = (str, int, float, bool, type(None))


def json_columns(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Convert arguments to JSON values; raise a fault that names the column which has others."""
    return {
        name: [_json_entry(value, name, index) for index, value in enumerate(values)]
        for name, values in columns.items()
    }


def _json_entry(value: Any, name: str, index: int) -> Any:
    try:
        return json_values(value)
    except TypeError as error:
        raise RewardFault(
            f"cannot receive the column {name!r}, which holds {error}: it runs outside this "
            "process, and JSON has no such type",
            index,
            "Convert it to text or a number in the dataset, or run the function in this process.",
        ) from error


def json_values(value: Any) -> Any:
    """Convert a value to lists, dictionaries, text and numbers; TypeError names other types.

    >>> json_values({"moves": ("e4", 1), "clock": 0.5})
    {'moves': ['e4', 1], 'clock': 0.5}
    >>> json_values([b"e4"])
    Traceback (most recent call last):
    TypeError: bytes
    """
    if isinstance(value, JSON_SCALARS):
        return value
    if isinstance(value, list | tuple):
        return [json_values(inner) for inner in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("keys that are not text")
        return {key: json_values(inner) for key, inner in value.items()}
    if getattr(value, "ndim", None) == 0:  # a NumPy or torch scalar
        return json_values(value.item())
    raise TypeError(type(value).__name__)


def nan_to_null(value: Any) -> Any:
    """Replace NaN and infinities by null: only Python's JSON has them.

    >>> nan_to_null({"price": [1.0, float("nan")]})
    {'price': [1.0, None]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [nan_to_null(inner) for inner in value]
    if isinstance(value, dict):
        return {key: nan_to_null(inner) for key, inner in value.items()}
    return value
