"""Rows of training, evaluation and warm start of the arithmetic task."""

from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

from klinic.tasks.arithmetic.skills import SKILLS, Question
from klinic.tasks.base import Row, choose
from klinic.tasks.held_out import first, fraction, is_held_out

SLIPS = 0.6  # above 0.5: greedy decoding shows the error; below 1: training can unlearn it


def train_rows(skill: str) -> list[Row]:
    """Return the training rows of a skill in a fixed shuffled order."""
    return [_row(skill, question) for question in _split(skill)[0]]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first `num` held-out rows of a skill; deterministic.

    >>> [row["prompt"] for row in eval_rows("addition", 3)]
    ['66+20=', '9+89=', '41+67=']
    """
    return list(first(held_out_rows(skill), num, skill))


def held_out_rows(skill: str) -> list[Row]:
    """Return all held-out rows of a skill in a fixed shuffled order."""
    return [_row(skill, question) for question in _split(skill)[1]]


def warm_start_rows(seed: int, skills: Sequence[str] = tuple(SKILLS)) -> Iterator[Row]:
    """Yield prompts and completions of the skills, sampled by their weights, endlessly.

    Completions are correct, except that 6 of 10 additions with a carry drop the carry.
    """
    random = Random(seed)  # noqa: S311 - samples rows, not secrets
    questions = {name: _split(name)[0] for name in skills}
    weights = [SKILLS[name].weight for name in skills]
    while True:
        (name,) = random.choices(skills, weights)
        (question,) = random.choices(questions[name])
        completion = question.answer
        if question.slip is not None and random.random() < SLIPS:
            completion = question.slip
        yield {"prompt": question.prompt, "completion": completion}


@cache
def _split(skill: str) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return training and held-out questions, each ordered by digest."""
    train: list[Question] = []
    held_out: list[Question] = []
    for question in choose("skill of arithmetic", skill, SKILLS).questions():
        is_out = is_held_out(f"{skill} {question.family}")
        (held_out if is_out else train).append(question)
    return _mixed(train), _mixed(held_out)


def _mixed(questions: list[Question]) -> tuple[Question, ...]:
    return tuple(sorted(questions, key=lambda question: fraction(question.prompt)))


def _row(skill: str, question: Question) -> Row:
    return {"prompt": question.prompt, "answer": question.answer, "skill": skill}
