"""Rewards of multi-hop questions, for MuSiQue rows and for the synthetic task.

MuSiQue rows have `answers`, a list with the answer and its aliases; synthetic rows have `answer`.
"""

from collections.abc import Sequence
from typing import Any

from klinic.rewards.levels import Grade, Levels, graduated
from klinic.tasks.multihop.answers import answer_of, is_exact
from klinic.tasks.multihop.answers import f1 as words_in_common
from klinic.tasks.said import Completion, said

MARKS = ("<answer>", "</answer>")


def exact(
    completions: Sequence[Completion],
    answers: Sequence[Sequence[str]] | None = None,
    answer: Sequence[str] | None = None,
    **columns: Any,  # noqa: ARG001 - the signature of every reward function
) -> list[float]:
    """Return 1 if the answer equals one of the correct ones, else 0."""
    given = zip(completions, _known(answers, answer), strict=True)
    return [float(is_exact(_said(text), known)) for text, known in given]


def f1(
    completions: Sequence[Completion],
    answers: Sequence[Sequence[str]] | None = None,
    answer: Sequence[str] | None = None,
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return the word F1 with the closest correct answer, from 0 to 1."""
    given = zip(completions, _known(answers, answer), strict=True)
    return [words_in_common(_said(text), known) for text, known in given]


@graduated(Levels(malformed=-0.3, part=0.1, whole=1.0))
def form(completion: Completion) -> Grade:
    """Grade the answer tags: one pair, with an answer inside and nothing after."""
    text = said(completion).strip()
    found = [text.count(mark) for mark in MARKS]
    if found == [1, 1] and answer_of(text) and text.endswith(MARKS[1]):
        return Grade("whole", "it has one answer between the tags")
    if any(found):
        return Grade(
            "part", f"it has {found[0]} opening and {found[1]} closing tags, or text after them"
        )
    return Grade("malformed", "it has no answer tags")


def context_kept(
    completions: Sequence[Completion],  # noqa: ARG001
    context: Sequence[float | str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return the fraction of supporting context in the prompt: a metric, with weight 0."""
    return [float(share) for share in context]


def _said(completion: Completion) -> str:
    return answer_of(said(completion)) or ""


def _known(
    answers: Sequence[Sequence[str]] | None, answer: Sequence[str] | None
) -> list[Sequence[str]]:
    if answers is not None:
        return list(answers)
    assert answer is not None  # noqa: S101 - rows have one of the two
    return [[right if answer_of(right) is None else str(answer_of(right))] for right in answer]
