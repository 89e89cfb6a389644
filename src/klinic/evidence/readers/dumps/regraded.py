"""Compares the rewards of a dump with the answers of the dataset that it holds.

Only completions with a marked final answer that is a number are compared, and a function's pay for
right ones with its pay for wrong ones: a reward for the format pays both alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from klinic.evidence.final_answers import dataset_number, marked_number

MIN_RIGHT = 2  # right completions of a prompt, for its own pay
MIN_WRONG_ANSWERS = 3  # different wrong numbers that are all paid, if the answer is a number
LONGEST = 2_000  # characters at the end of a text that are searched for its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """The completions of a step with a number as their answer."""

    number: np.ndarray
    gold: np.ndarray
    """The dataset's; NaN where it is no number."""
    group: np.ndarray
    rewards: np.ndarray
    """A column per reward function."""

    @property
    def right(self) -> np.ndarray:
        """Whether the answer is the dataset's."""
        return np.asarray(self.number == self.gold)


def regrade_rows(
    texts: Sequence[str], answers: Sequence[str], rewards: np.ndarray, group: np.ndarray
) -> dict[str, int]:
    """Return the facts of a step by name; empty if no completion can be compared.

    `rewards` has a column per reward function.
    """
    found = _read_answers(texts, answers, rewards, group)
    if found is None:
        return {}
    right = found.right
    wrong = ~right & ~np.isnan(found.gold)
    facts = {"regraded_wrong": int(wrong.sum())}
    if not wrong.any():  # nothing to compare the pay of right ones with
        right = np.zeros_like(right)
    facts["regraded_right"] = int(right.sum())
    lowest = np.nanmin(found.rewards[wrong], axis=0, initial=np.inf)
    paid = (found.rewards > lowest).any(axis=1)
    pay = [paid[rows] for rows in _rows_by_group(found.group, right) if rows.size >= MIN_RIGHT]
    facts["regraded_right_paid"] = int((paid & right).sum())
    facts["regraded_prompts"] = len(pay)
    facts["regraded_prompts_paid"] = sum(bool(of_prompt.all()) for of_prompt in pay)
    facts["regraded_prompts_unpaid"] = sum(not of_prompt.any() for of_prompt in pay)
    apart, alike = max(
        (_count_by_pay(found, column) for column in found.rewards.T), key=lambda counts: counts[0]
    )
    return facts | {"regraded_told_apart": apart, "regraded_all_paid": alike}


def _read_answers(
    texts: Sequence[str], answers: Sequence[str], rewards: np.ndarray, group: np.ndarray
) -> _Answers | None:
    used = [
        (index, number)
        for index, text in enumerate(texts)
        if answers[index] and (number := marked_number(text[-LONGEST:])) is not None
    ]
    if not used or not rewards.shape[1]:
        return None
    indices = [index for index, _ in used]
    gold = [dataset_number(answers[index][-LONGEST:]) for index in indices]
    return _Answers(
        number=np.array([number for _, number in used]),
        gold=np.array([np.nan if value is None else value for value in gold]),
        group=group[indices],
        rewards=rewards[indices],
    )


def _rows_by_group(group: np.ndarray, used: np.ndarray) -> Iterator[np.ndarray]:
    for number in np.unique(group[used]):
        yield np.flatnonzero(used & (group == number))


def _count_by_pay(found: _Answers, reward: np.ndarray) -> tuple[int, int]:
    """Return the prompts in which right answers alone are paid, and those that pay any answer."""
    highest, right = np.nanmax(reward, initial=-np.inf), found.right
    is_paid = reward == highest
    apart = alike = 0
    for rows in _rows_by_group(found.group, np.isfinite(reward)):
        if right[rows].any() and not right[rows].all():
            apart += bool((is_paid[rows] == right[rows]).all())
        alike += bool(is_paid[rows].all()) and _are_wrong(found.number[rows], found.gold[rows[0]])
    return apart, alike


def _are_wrong(numbers: np.ndarray, gold: float) -> bool:
    """Return whether equal pay for these answers cannot be right."""
    different = np.unique(numbers)
    if np.isnan(gold):
        return len(different) > 1
    wrong = different[different != gold]
    return len(wrong) >= MIN_WRONG_ANSWERS and bool(np.ptp(wrong) > max(abs(gold), 1.0))
