"""The skills of the arithmetic task: every question there is, with its only right answer.

    skill         prompt             answer
    addition      47+38=             85
    subtraction   71-25=             46
    copying       copy 4821=         4821
    reversing     reverse 4821=      1284
    comparing     compare 52 17=     >

One skill is to be trained; the others tell what training it does to what the model knew.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

NUMBERS = range(100)
TWO_DIGITS = range(10, 100)
NUMERALS = range(10_000)  # written with four digits

NUMBER = re.compile(r"0|[1-9][0-9]*")
DIGITS = re.compile(r"[0-9]+")
SIGN = re.compile(r"[<=>]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and its answer."""

    prompt: str
    answer: str
    family: str
    """Questions of one family are held out together: 47+38 gives 38+47 away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A kind of question, and what an answer to it looks like."""

    name: str
    questions: Callable[[], Iterator[Question]]
    form: re.Pattern[str]
    """What the whole completion must match to be an answer, right or wrong."""
    weight: float
    """Its part in the mix of a warm start, relative to the others."""


def _addition() -> Iterator[Question]:
    for a, b in product(NUMBERS, NUMBERS):
        family = f"{min(a, b)}+{max(a, b)}"
        yield Question(prompt=f"{a}+{b}=", answer=str(a + b), family=family)


def _subtraction() -> Iterator[Question]:
    for a, b in product(TWO_DIGITS, TWO_DIGITS):
        if a >= b:
            yield Question(prompt=f"{a}-{b}=", answer=str(a - b), family=f"{a}-{b}")


def _copying() -> Iterator[Question]:
    for numeral in (f"{number:04}" for number in NUMERALS):
        yield Question(prompt=f"copy {numeral}=", answer=numeral, family=numeral)


def _reversing() -> Iterator[Question]:
    for numeral in (f"{number:04}" for number in NUMERALS):
        yield Question(prompt=f"reverse {numeral}=", answer=numeral[::-1], family=numeral)


def _comparing() -> Iterator[Question]:
    for a, b in product(NUMBERS, NUMBERS):
        answer = "<" if a < b else ">" if a > b else "="
        family = f"{min(a, b)} {max(a, b)}"
        yield Question(prompt=f"compare {a} {b}=", answer=answer, family=family)


SKILLS = {
    skill.name: skill
    for skill in (
        Skill(name="addition", questions=_addition, form=NUMBER, weight=1.0),
        Skill(name="subtraction", questions=_subtraction, form=NUMBER, weight=1.0),
        Skill(name="copying", questions=_copying, form=DIGITS, weight=1.0),
        Skill(name="reversing", questions=_reversing, form=DIGITS, weight=1.0),
        Skill(name="comparing", questions=_comparing, form=SIGN, weight=1.0),
    )
}
