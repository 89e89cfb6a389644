"""Verdict: the result of a check on a step or on a scalar log."""

from enum import StrEnum


class Verdict(StrEnum):
    """Whether evidence supports a cause, contradicts it, or is missing."""

    PASS = "pass"  # noqa: S105 - a verdict
    WARN = "warn"
    FAIL = "fail"
    NO_DATA = "no data"

    @property
    def mark(self) -> str:
        """One-character symbol for lists."""
        return {"fail": "✗", "warn": "!", "pass": "✓", "no data": "?"}[self]
