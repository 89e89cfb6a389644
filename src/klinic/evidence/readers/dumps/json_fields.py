"""Checked fields of a JSON line of a dump: numbers, texts and lists of numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from klinic.errors import EvidenceError
from klinic.evidence.files import LONGEST, Journal
from klinic.evidence.readers.log import MAX_STEP, parse_number, parse_step

ADVICE = "It was cut short or edited; restore it from a copy, or delete the line"
LARGEST_ID = 2**31  # of a token; vocabularies have less than a million


@dataclass(frozen=True, slots=True)
class JsonEntry:
    """One line of a dump."""

    values: dict[str, Any]
    where: str
    """Path and line, for messages."""

    def number(self, name: str) -> float:
        """Return a number; NaN for null or a missing field."""
        value = parse_number(self.values.get(name))
        if value is None:
            raise self.error(name, "a number")
        return value

    def step(self, name: str) -> int:
        """Return a step, which some writers quote."""
        value = self.values.get(name)
        if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(MAX_STEP)):
            value = int(value)
        step = parse_step(value)
        if step is None:
            raise self.error(name, "a step, a whole number")
        return step

    def text(self, name: str) -> str:
        """Return a text; "" for null or a missing field."""
        value = self.values.get(name) or ""
        if not isinstance(value, str):
            raise self.error(name, "a text")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self.error(name, "a list")
        return value

    def ids(self, name: str) -> np.ndarray:
        """Return token ids."""
        values = self.items(name)
        # by type first: NumPy would take booleans, and numbers in texts
        if not {int}.issuperset(map(type, values)):
            raise self.error(name, "a list of token ids")
        try:
            ids = np.array(values, np.int64)
        except OverflowError as error:
            raise self.error(name, "a list of token ids") from error
        if ids.size and not -LARGEST_ID < ids.min() <= ids.max() < LARGEST_ID:
            raise self.error(name, "a list of token ids")
        return ids

    def floats(self, name: str) -> np.ndarray | None:
        """Return a list of numbers with null as NaN; None if the field is missing or null."""
        if self.values.get(name) is None:
            return None
        items = self.items(name)
        if {float}.issuperset(map(type, items)):  # a dump has millions
            return np.array(items, np.float64)
        values = [parse_number(value) for value in items]
        if None in values:
            raise self.error(name, "a list of numbers")
        return np.array(values, np.float64)

    def error(self, name: str, wanted: str) -> EvidenceError:
        """Return the error for a field of another type."""
        return EvidenceError(f"{self.where}: `{name[:40]}` is not {wanted}. {ADVICE}.")


def read_entries(path: Path, *, longest: int = LONGEST) -> Iterator[JsonEntry]:
    """Yield the lines of a file; a torn last line is skipped."""
    for number, values in enumerate(Journal(path, longest=longest).entries(), 1):
        yield JsonEntry(values, f"{path}, line {number}")
