"""Splits rows into training and held-out by a digest of their text.

The digest is the same in every process, on every machine and in every version of Python. Sorting by
it gives a fixed pseudo-random order, so that any prefix is an unbiased sample.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

from klinic.errors import ConfigError

HeldOut = TypeVar("HeldOut")

HELD_OUT_FRACTION = 0.2  # fraction of the questions of each skill


def digest_fraction(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text alone.

    >>> round(digest_fraction("47+38="), 4)
    0.9823
    """
    return int.from_bytes(sha256(text.encode()).digest()[:6]) / 2**48


def is_held_out(text: str) -> bool:
    """Return whether a text is held out of training."""
    return digest_fraction(text) < HELD_OUT_FRACTION


def first_rows(rows: Sequence[HeldOut], num: int, skill: str) -> Sequence[HeldOut]:
    """Return the first `num` held-out rows; raise ConfigError if there are fewer."""
    if not 0 < num <= len(rows):
        raise ConfigError(
            f"{num} held-out rows of {skill} requested, but there are {len(rows)}. "
            f"Use 1 to {len(rows)}."
        )
    return rows[:num]
