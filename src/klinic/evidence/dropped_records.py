"""Records that a run dropped to stay within its budget, as its events list them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import Journal
from klinic.evidence.numbers import as_step
from klinic.evidence.run_facts import EVENTS

DROPPED_EVENT = "records dropped"
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRecords:
    """The steps whose records were dropped and are not there."""

    num_steps: int = 0
    first: int = 0
    last: int = 0

    @property
    def sentence(self) -> str:
        """What is not judged; empty if nothing was dropped."""
        if not self.num_steps:
            return ""
        return (
            f"Not judged: {self.num_steps:,} steps from {self.first} to {self.last}, whose records "
            "output.keep_records dropped."
        )

    def to_json(self) -> dict[str, int] | None:
        """Return the steps as JSON values; None if nothing was dropped."""
        return asdict(self) if self.num_steps else None


NOTHING_DROPPED = DroppedRecords()


def read_dropped(run: Path, recorded: Sequence[int]) -> DroppedRecords:
    """Return the dropped steps of a run with these records; a line that lists none is skipped.

    Damaged events say nothing of the records that are there, so they are no reason not to judge.
    """
    try:
        events = list(Journal(run / EVENTS).entries())
    except EvidenceError:
        return NOTHING_DROPPED
    listed = [r for e in events if e.get("event") == DROPPED_EVENT for r in _ranges_of(e)]
    merged = _merge_ranges(listed)
    if not merged:
        return NOTHING_DROPPED
    num = sum(last - first + 1 for first, last in merged)
    again = sum(1 for step in recorded if any(a <= step <= b for a, b in merged))
    return DroppedRecords(num_steps=num - again, first=merged[0][0], last=merged[-1][1])


def to_ranges(steps: Iterable[int]) -> list[Range]:
    """Return the ranges of consecutive steps.

    >>> to_ranges([2, 3, 4, 9])
    [(2, 4), (9, 9)]
    """
    return _merge_ranges([(step, step) for step in steps])


def _merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _ranges_of(event: dict[str, Any]) -> list[Range]:
    listed = event.get("steps")
    ranges = []
    for entry in listed if isinstance(listed, list) else []:
        ends = [as_step(end) for end in entry] if isinstance(entry, list) else []
        if len(ends) == 2 and ends[0] is not None and ends[1] is not None and ends[0] <= ends[1]:
            ranges.append((ends[0], ends[1]))
    return ranges
