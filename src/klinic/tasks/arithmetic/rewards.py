"""The rewards of arithmetic: right or wrong, or a part of the reward for a part of the answer.

completion of 47+38=    binary   graduated
85                      1.0      1.0
84                      0.0      0.45   one of two digits is right
12                      0.0      0.1    an answer, and wrong throughout
8 5, or nothing         0.0      -0.3   not an answer
"""

from collections.abc import Sequence
from typing import Any

from klinic.tasks.arithmetic.skills import SKILLS
from klinic.tasks.base import Row, choose

MALFORMED = -0.3
WRONG, NEARLY = 0.1, 0.8  # of an answer without, and with almost, all of its characters right
RIGHT = 1.0


def parse(row: Row, completion: str) -> str | None:
    """Return the answer in a completion, or None where it is not one of the row's skill.

    >>> parse({"skill": "addition"}, " 85 ")
    '85'
    >>> parse({"skill": "addition"}, "85=85") is None
    True
    """
    text = completion.strip()
    form = choose("skill of arithmetic", row["skill"], SKILLS).form
    return text if form.fullmatch(text) else None


def binary(
    prompts: Sequence[str],  # noqa: ARG001 - the signature of every reward function
    completions: Sequence[str],
    answer: Sequence[str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return 1 for the right answer and 0 for everything else.

    >>> binary(["47+38="] * 2, ["85", "84"], ["85"] * 2)
    [1.0, 0.0]
    """
    given = zip(completions, answer, strict=True)
    return [RIGHT if completion.strip() == right else 0.0 for completion, right in given]


def graduated(
    prompts: Sequence[str],  # noqa: ARG001 - the signature of every reward function
    completions: Sequence[str],
    answer: Sequence[str],
    skill: Sequence[str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return 1 if right, 0.1 to 0.8 for a wrong answer by the digits that are right, else -0.3.

    Digits are compared from the last one on, units with units, and divided by the length of the
    longer one: an answer that runs on gains nothing.

    >>> graduated(["47+38="] * 3, ["85", "12", "8 5"], ["85"] * 3, ["addition"] * 3)
    [1.0, 0.1, -0.3]
    """
    given = zip(completions, answer, skill, strict=True)
    return [_grade(parse({"skill": name}, text), right) for text, right, name in given]


def _grade(given: str | None, right: str) -> float:
    if given is None:
        return MALFORMED
    if given == right:
        return RIGHT
    same = sum(a == b for a, b in zip(reversed(given), reversed(right), strict=False))
    return WRONG + (NEARLY - WRONG) * same / max(len(given), len(right))
