"""The skills of the arithmetic task: all questions with their answers.

    skill         prompt             answer
    addition      47+38=             85
    subtraction   71-25=             46
    copying       copy 4821=         4821
    reversing     reverse 4821=      1284
    comparing     compare 52 17=     >

Addition is the skill to train: a warm start teaches the model to drop the carry (47+38=75) in most
cases. The other skills measure forgetting.
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
    """Questions of one family are held out together: 47+38 would leak 38+47."""
    wrong_answer: str | None = None
    """A wrong answer that the warm start teaches in addition to the correct one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A kind of question, and the format of its answers."""

    name: str
    questions: Callable[[], Iterator[Question]]
    answer_format: re.Pattern[str]
    """Pattern that the whole completion must match to be an answer."""
    weight: float
    """Relative sampling weight in the warm start."""


def _addition_questions() -> Iterator[Question]:
    for a, b in product(NUMBERS, NUMBERS):
        family = f"{min(a, b)}+{max(a, b)}"
        carries = a % 10 + b % 10 >= 10
        slip = str(a + b - 10) if carries else None
        yield Question(prompt=f"{a}+{b}=", answer=str(a + b), family=family, wrong_answer=slip)


def _subtraction_questions() -> Iterator[Question]:
    for a, b in product(TWO_DIGITS, TWO_DIGITS):
        if a >= b:
            yield Question(prompt=f"{a}-{b}=", answer=str(a - b), family=f"{a}-{b}")


def _copying_questions() -> Iterator[Question]:
    for numeral in (f"{number:04}" for number in NUMERALS):
        yield Question(prompt=f"copy {numeral}=", answer=numeral, family=numeral)


def _reversing_questions() -> Iterator[Question]:
    for numeral in (f"{number:04}" for number in NUMERALS):
        yield Question(prompt=f"reverse {numeral}=", answer=numeral[::-1], family=numeral)


def _comparing_questions() -> Iterator[Question]:
    for a, b in product(NUMBERS, NUMBERS):
        answer = "<" if a < b else ">" if a > b else "="
        family = f"{min(a, b)} {max(a, b)}"
        yield Question(prompt=f"compare {a} {b}=", answer=answer, family=family)


SKILLS = {
    skill.name: skill
    for skill in (
        Skill(name="addition", questions=_addition_questions, answer_format=NUMBER, weight=1.2),
        Skill(
            name="subtraction", questions=_subtraction_questions, answer_format=NUMBER, weight=1.4
        ),
        Skill(name="copying", questions=_copying_questions, answer_format=DIGITS, weight=0.3),
        Skill(name="reversing", questions=_reversing_questions, answer_format=DIGITS, weight=0.3),
        Skill(name="comparing", questions=_comparing_questions, answer_format=SIGN, weight=0.6),
    )
}
