"""Rows of training, evaluation and warm start of the arithmetic task."""

from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

from klinic.tasks.arithmetic.skills import SKILLS, Question
from klinic.tasks.base import Row, look_up
from klinic.tasks.held_out import digest_fraction, first_rows, is_held_out

DROPPED_CARRY_RATE = (
    0.6  # above 0.5: greedy decoding shows the error; below 1: training can unlearn it
)


def train_rows(skill: str) -> list[Row]:
    """Return the training rows of a skill in a fixed shuffled order."""
    return [_make_row(skill, question) for question in _split_questions(skill)[0]]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first `num` held-out rows of a skill; deterministic.

    >>> [row["prompt"] for row in eval_rows("addition", 3)]
    ['66+20=', '9+89=', '41+67=']
    """
    questions = first_rows(_split_questions(skill)[1], num, skill)
    return [_make_row(skill, question) for question in questions]


def held_out_rows(skill: str) -> list[Row]:
    """Return all held-out rows of a skill in a fixed shuffled order."""
    return [_make_row(skill, question) for question in _split_questions(skill)[1]]


def warm_start_rows(seed: int, skills: Sequence[str] = tuple(SKILLS)) -> Iterator[Row]:
    """Yield prompts and completions of the skills, sampled by their weights, endlessly.

    Completions are correct, except that 6 of 10 additions with a carry drop the carry.
    """
    random = Random(seed)  # noqa: S311 - samples rows, not secrets
    questions = {name: _split_questions(name)[0] for name in skills}
    weights = [SKILLS[name].weight for name in skills]
    while True:
        (name,) = random.choices(skills, weights)
        (question,) = random.choices(questions[name])
        completion = question.answer
        if question.wrong_answer is not None and random.random() < DROPPED_CARRY_RATE:
            completion = question.wrong_answer
        yield {"prompt": question.prompt, "completion": completion}


@cache
def _split_questions(skill: str) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return training and held-out questions, each ordered by digest."""
    train: list[Question] = []
    held_out: list[Question] = []
    for question in look_up("skill of arithmetic", skill, SKILLS).questions():
        is_out = is_held_out(f"{skill} {question.family}")
        (held_out if is_out else train).append(question)
    return _sort_by_digest(train), _sort_by_digest(held_out)


def _sort_by_digest(questions: list[Question]) -> tuple[Question, ...]:
    return tuple(sorted(questions, key=lambda question: digest_fraction(question.prompt)))


def _make_row(skill: str, question: Question) -> Row:
    return {"prompt": question.prompt, "answer": question.answer, "skill": skill}
