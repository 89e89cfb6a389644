"""Numbers as a page prints them: four digits, and 0 for what is only rounding."""

import math
from typing import SupportsFloat

ROUNDING = 1e-12  # smaller values are the rounding of sums whose terms cancel


def short_number(value: SupportsFloat) -> str:
    """Return a number with four digits; text.js prints in the same way.

    >>> short_number(0.123456), short_number(6.34e-17), short_number(-2e-5)
    ('0.1235', '0', '-2e-05')
    """
    return f"{zero_rounding(float(value)):.4g}"


def zero_rounding(value: float) -> float:
    """Return 0 for a value that is only rounding, else the value.

    >>> zero_rounding(6.34e-17), zero_rounding(1e-9)
    (0.0, 1e-09)
    """
    return 0.0 if math.isfinite(value) and abs(value) < ROUNDING else value
