"""The budget of step records: a number of steps, or a size such as `20 GB`."""

import re
from dataclasses import dataclass

SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([MGT]B)")
MOST_STEPS = 10**9
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBudget:
    """At most this many steps, or bytes; one of the two."""

    steps: int | None = None
    num_bytes: int | None = None


def parse_record_budget(value: int | str) -> RecordBudget:
    """Return the budget of a setting; raise ValueError if it is none.

    >>> parse_record_budget(200).steps, parse_record_budget("1.5 GB").num_bytes
    (200, 1500000000)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 < value <= MOST_STEPS:
            return RecordBudget(steps=value)
    elif isinstance(value, str) and (match := SIZE.fullmatch(value.strip())):
        num_bytes = round(float(match[1]) * UNITS[match[2]])
        if num_bytes > 0:
            return RecordBudget(num_bytes=num_bytes)
    raise ValueError(
        "it is a number of steps above 0, or a size in MB, GB or TB: 200, or 20 GB. null keeps all"
    )
