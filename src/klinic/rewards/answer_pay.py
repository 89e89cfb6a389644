"""Compares the pay of completions that state the dataset's answer with that of the others.

Reads the rewards that were given and calls no reward function again: one may be slow, cost money or
count its calls. Only functions that read an answer column are compared, because a dataset may have
an answer that its rewards ignore on purpose. Only a completion whose whole text or marked final
answer equals the dataset's states it: another number in a text may be none.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from klinic.evidence.final_answers import ANSWER_COLUMNS, final_answers

RELATIVE_ROUNDING = 1e-6  # of a mean of float32 rewards


def count_paid_answers(
    rows: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    rewards: np.ndarray,
    functions: Sequence[Callable[..., Any]],
    group: np.ndarray,
) -> dict[str, int]:
    """Return the facts of a graded batch by name; empty if no function reads an answer column.

    `rows` are the dataset rows of the completions, `rewards` has a column per function.
    """
    columns = [_answer_column(function, rows[0]) for function in functions] if rows else []
    right = {name: _states_answer(rows, texts, name) for name in columns if name is not None}
    signs = [
        _group_signs(rewards[:, number], right[name], group)
        for number, name in enumerate(columns)
        if name is not None
    ]
    if not signs:
        return {}
    best = np.fmax.reduce(signs)  # NaN where no function has both kinds of completions
    return {
        "answer_prompts": int(np.isfinite(best).sum()),
        "answer_paid_more": int((best > 0).sum()),
        "answer_paid_less": int(((best == 0) & (np.fmin.reduce(signs) < 0) | (best < 0)).sum()),
    }


def _answer_column(function: Callable[..., Any], row: Mapping[str, Any]) -> str | None:
    """Return the answer column that a function names as an argument, or as a key of its kwargs."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    keys = code.co_consts if code.co_flags & inspect.CO_VARKEYWORDS else ()
    known = [name for name in ANSWER_COLUMNS if isinstance(row.get(name), str | int | float)]
    return next((name for name in known if name in arguments or name in keys), None)


def _states_answer(
    rows: Sequence[Mapping[str, Any]], texts: Sequence[str], column: str
) -> np.ndarray:
    pairs = zip(rows, texts, strict=True)
    return np.array(
        [bool(final_answers(str(row[column])) & final_answers(text)) for row, text in pairs]
    )


def _group_signs(rewards: np.ndarray, right: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return for each group 1, 0 or -1: the answer is paid more, the same or less than the rest.

    NaN where a group has only one kind of completion.
    """
    signs = np.full(int(group.max(initial=-1)) + 1, np.nan)
    given = np.isfinite(rewards)
    for number in np.unique(group):
        rows = given & (group == number)
        paid, others = rewards[rows & right], rewards[rows & ~right]
        if paid.size and others.size:
            difference = float(paid.mean() - others.mean())
            rounding = RELATIVE_ROUNDING * float(np.abs(rewards[rows]).max())
            signs[number] = 0.0 if abs(difference) <= rounding else np.sign(difference)
    return signs
