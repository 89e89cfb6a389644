"""Verdicts: the result of a check on a step or on a scalar log, and the form of a diagnosis."""

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


class RunVerdict(StrEnum):
    """The form of a diagnosis."""

    CAUSE = "cause"
    """A cause is stated."""
    LIKELY = "likely"
    """A cause is likely, and another one is not excluded."""
    NONE = "none"
    """No cause is likely; checks may have failed."""
    UNREAD = "unread"
    """KL, reward and sampler gap are not in the log."""
