"""Sums of numbers below 30, as a task: a part of arithmetic, with its rewards and its bad habit.

A warm start of all of arithmetic takes minutes, most of them for skills that nobody trains. Here
every example is a sum, and there are few enough of them to be learnt in half a minute.
"""

from collections.abc import Iterator
from dataclasses import replace

from klinic.tasks.arithmetic import rows
from klinic.tasks.arithmetic.task import TASK as ARITHMETIC
from klinic.tasks.base import Row, choose
from klinic.tasks.held_out import first

SKILL = "addition"
LARGEST = 29


def train_rows(skill: str) -> list[Row]:
    """Return all sums that are not held out, in a fixed mixed order."""
    return [row for row in rows.train_rows(_known(skill)) if _is_small(row)]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first `num` sums that are held out; the same ones every time.

    >>> [row["prompt"] for row in eval_rows("addition", 3)]
    ['25+19=', '22+4=', '23+3=']
    """
    held_out = [row for row in rows.held_out_rows(_known(skill)) if _is_small(row)]
    return list(first(held_out, num, skill))


def warm_start_rows(seed: int) -> Iterator[Row]:
    """Yield sums and completions without end; the carry is forgotten in 6 of 10 that need one."""
    return (row for row in rows.warm_start_rows(seed, skills=(SKILL,)) if _is_small(row))


def _known(skill: str) -> str:
    return choose("skill of sums", skill, {SKILL: SKILL})


def _is_small(row: Row) -> bool:
    return all(int(number) <= LARGEST for number in row["prompt"].removesuffix("=").split("+"))


TASK = replace(
    ARITHMETIC,
    name="sums",
    skills=(SKILL,),
    train_rows=train_rows,
    eval_rows=eval_rows,
    warm_start_rows=warm_start_rows,
)
