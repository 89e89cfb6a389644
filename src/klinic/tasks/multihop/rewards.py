"""Rewards of multi-hop questions, for MuSiQue rows and for the synthetic task.

MuSiQue rows have `answers`, a list with the answer and its aliases; synthetic rows have `answer`.
"""

from collections.abc import Sequence
from typing import Any

from klinic.rewards.levels import Grade, Levels, graduated
from klinic.tasks.base import Completion, completion_text
from klinic.tasks.multihop.answers import extract_answer, is_exact
from klinic.tasks.multihop.answers import f1 as words_in_common

ANSWER_TAGS = ("<answer>", "</answer>")


def exact(
    completions: Sequence[Completion],
    answers: Sequence[Sequence[str]] | None = None,
    answer: Sequence[str] | None = None,
    **columns: Any,  # noqa: ARG001 - the signature of every reward function
) -> list[float]:
    """Return 1 if the answer equals one of the correct ones, else 0."""
    pairs = zip(completions, _accepted_answers(answers, answer), strict=True)
    return [float(is_exact(_answer_text(text), accepted)) for text, accepted in pairs]


def f1(
    completions: Sequence[Completion],
    answers: Sequence[Sequence[str]] | None = None,
    answer: Sequence[str] | None = None,
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return the word F1 with the closest correct answer, from 0 to 1."""
    pairs = zip(completions, _accepted_answers(answers, answer), strict=True)
    return [words_in_common(_answer_text(text), accepted) for text, accepted in pairs]


@graduated(Levels(malformed=-0.3, part=0.1, whole=1.0))
def form(completion: Completion) -> Grade:
    """Grade the answer tags: one pair, with an answer inside and nothing after."""
    text = completion_text(completion).strip()
    tag_counts = [text.count(mark) for mark in ANSWER_TAGS]
    if tag_counts == [1, 1] and extract_answer(text) and text.endswith(ANSWER_TAGS[1]):
        return Grade("whole", "it has one answer between the tags")
    if any(tag_counts):
        return Grade(
            "part",
            f"it has {tag_counts[0]} opening and {tag_counts[1]} closing tags, or text after them",
        )
    return Grade("malformed", "it has no answer tags")


def context_kept(
    completions: Sequence[Completion],  # noqa: ARG001
    context: Sequence[float | str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return the fraction of supporting context in the prompt: a metric, with weight 0."""
    return [float(share) for share in context]


def _answer_text(completion: Completion) -> str:
    return extract_answer(completion_text(completion)) or ""


def _accepted_answers(
    answers: Sequence[Sequence[str]] | None, answer: Sequence[str] | None
) -> list[Sequence[str]]:
    if answers is not None:
        return list(answers)
    assert answer is not None  # noqa: S101 - rows have one of the two
    return [
        [right if extract_answer(right) is None else str(extract_answer(right))] for right in answer
    ]
