"""The sums task: additions of numbers below 30, a subset of arithmetic with the same rewards.

The warm start of the full arithmetic task takes minutes, mostly for skills that are not trained.
These additions are few enough to be learned in half a minute.
"""

from collections.abc import Iterator
from dataclasses import replace

from klinic.tasks.arithmetic import rows
from klinic.tasks.arithmetic.task import TASK as ARITHMETIC
from klinic.tasks.base import Row, look_up
from klinic.tasks.held_out import first_rows

SKILL = "addition"
MAX_OPERAND = 29


def train_rows(skill: str) -> list[Row]:
    """Return the training rows in a fixed shuffled order."""
    return [row for row in rows.train_rows(_check_skill(skill)) if _is_small(row)]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first `num` held-out rows; deterministic.

    >>> [row["prompt"] for row in eval_rows("addition", 3)]
    ['25+19=', '22+4=', '23+3=']
    """
    held_out = [row for row in rows.held_out_rows(_check_skill(skill)) if _is_small(row)]
    return list(first_rows(held_out, num, skill))


def warm_start_rows(seed: int) -> Iterator[Row]:
    """Yield prompts and completions endlessly; 6 of 10 that need a carry drop it."""
    return (row for row in rows.warm_start_rows(seed, skills=(SKILL,)) if _is_small(row))


def _check_skill(skill: str) -> str:
    return look_up("skill of sums", skill, {SKILL: SKILL})


def _is_small(row: Row) -> bool:
    return all(int(number) <= MAX_OPERAND for number in row["prompt"].removesuffix("=").split("+"))


TASK = replace(
    ARITHMETIC,
    name="sums",
    skills=(SKILL,),
    train_rows=train_rows,
    eval_rows=eval_rows,
    warm_start_rows=warm_start_rows,
)
