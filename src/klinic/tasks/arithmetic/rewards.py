"""Rewards of the arithmetic task: binary, and graduated with partial credit.

completion of 47+38=    binary   graduated
85                      1.0      1.0
84                      0.0      0.45   one of two digits is correct
12                      0.0      0.1    an answer without a correct digit
8 5, or nothing         0.0      -0.3   not an answer
"""

from collections.abc import Mapping, Sequence
from typing import Any

from klinic.rewards.levels import Grade, Levels
from klinic.rewards.levels import graduated as in_levels
from klinic.tasks.arithmetic.skills import SKILLS
from klinic.tasks.base import look_up

LEVELS = Levels(malformed=-0.3, wrong=(0.1, 0.8), right=1.0)


def parse(row: Mapping[str, str], completion: str) -> str | None:
    """Return the answer in a completion, or None if it is not in the skill's format.

    >>> parse({"skill": "addition"}, " 85 ")
    '85'
    >>> parse({"skill": "addition"}, "85=85") is None
    True
    """
    text = completion.strip()
    form = look_up("skill of arithmetic", row["skill"], SKILLS).answer_format
    return text if form.fullmatch(text) else None


def binary(
    prompts: Sequence[str],  # noqa: ARG001 - the signature of every reward function
    completions: Sequence[str],
    answer: Sequence[str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return 1 for the correct answer and 0 otherwise.

    >>> binary(["47+38="] * 2, ["85", "84"], ["85"] * 2)
    [1.0, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [float(completion.strip() == right) for completion, right in pairs]


@in_levels(LEVELS)
def graduated(completion: str, answer: str, skill: str) -> Grade:
    """Grade a completion: right, wrong with the fraction of correct digits, or malformed.

    Digits are compared from the last one on, units with units; the count is divided by the length
    of the longer number, so extra digits gain nothing.

    >>> graduated(["47+38="] * 3, ["85", "12", "8 5"], ["85"] * 3, ["addition"] * 3)
    [1.0, 0.1, -0.3]
    """
    parsed = parse({"skill": skill}, completion)
    if parsed is None:
        return Grade("malformed", f"it is not an answer of {skill}")
    if parsed == answer:
        return Grade("right", "it is the answer")
    same = sum(a == b for a, b in zip(reversed(parsed), reversed(answer), strict=False))
    of = max(len(parsed), len(answer))
    return Grade("wrong", f"{same} of {of} characters are right", share=same / of)
