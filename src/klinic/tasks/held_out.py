"""What is held out, decided by a digest of the text itself.

A digest is the same in every process, on every machine and in every version of Python; it also
gives an order in which the first rows are as good a sample as any.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

from klinic.errors import ConfigError

HeldOut = TypeVar("HeldOut")

HELD_OUT = 0.2  # of the questions of each skill


def fraction(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text alone.

    >>> round(fraction("47+38="), 4)
    0.9823
    """
    return int.from_bytes(sha256(text.encode()).digest()[:6]) / 2**48


def is_held_out(text: str) -> bool:
    """Whether a text is one of those that are never trained on."""
    return fraction(text) < HELD_OUT


def first(rows: Sequence[HeldOut], num: int, skill: str) -> Sequence[HeldOut]:
    """Return the first `num` held-out rows, or say how many there are."""
    if not 0 < num <= len(rows):
        raise ConfigError(
            f"{num} held-out rows of {skill} were asked for, and there are {len(rows)}. "
            f"Use 1 to {len(rows)}."
        )
    return rows[:num]
