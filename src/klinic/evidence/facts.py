"""Lossless JSON for facts: JSON has no NaN, and null means "not recorded"."""

import math
from typing import Any

from klinic.evidence.record import Fact

NON_FINITE = ("NaN", "Infinity", "-Infinity")
"""JSON strings for non-finite numbers."""


def fact_to_json(value: Any) -> Any:
    """Return a fact as JSON that `fact_from_json` reads back exactly.

    >>> fact_to_json(float("-inf")), fact_to_json(0.1), fact_to_json(None)
    ('-Infinity', 0.1, None)
    """
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else NON_FINITE[1 if value > 0 else 2]


def fact_from_json(value: Any) -> Fact:
    """Return the fact that `fact_to_json` wrote."""
    return float(value) if isinstance(value, str) and value in NON_FINITE else value
