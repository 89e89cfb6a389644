"""What a check says of a step, and a sign of a log."""

from enum import StrEnum


class Verdict(StrEnum):
    """Whether evidence speaks for a cause, against it, or not at all."""

    PASS = "pass"  # noqa: S105 - a verdict
    WARN = "warn"
    FAIL = "fail"
    NO_DATA = "no data"

    @property
    def mark(self) -> str:
        """One character for a list of many."""
        return {"fail": "✗", "warn": "!", "pass": "✓", "no data": "?"}[self]
