"""The pay of completions that state the dataset's answer."""

import numpy as np

from klinic.rewards.answer_pay import count_paid_answers

GROUP = np.repeat([0, 1, 2], 4)
TEXTS = ["7", "8", "so \\boxed{7}", "<answer>6</answer>"] * 2 + ["1", "2", "3", "4"]
RIGHT = np.array([text in ("7", "so \\boxed{7}") for text in TEXTS])
ROWS = [{"prompt": "3+4=", "answer": "7\n"}] * len(TEXTS)  # the third group has no right answer


def exact(completions, answer):
    return completions, answer


def by_key(completions, **kwargs):
    return completions, kwargs["answer"]


def unrelated(completions, **_):
    answer = [text.strip() for text in completions]  # a local name is no column
    return [float(text == "") for text in answer]


def counts(rewards, *functions):
    columns = np.stack([np.asarray(r, float) for r in rewards], axis=1)
    facts = count_paid_answers(ROWS, TEXTS, columns, functions, GROUP)
    return tuple(facts.get(f"answer_{name}") for name in ("prompts", "paid_more", "paid_less"))


def test_right_answers_count_by_what_they_are_paid():
    assert counts([RIGHT], exact) == (2, 2, 0)
    assert counts([RIGHT], by_key) == (2, 2, 0)
    assert counts([np.zeros(12)], exact) == (2, 0, 0)
    assert counts([~RIGHT], exact) == (2, 0, 2)
    # equal float32 rewards whose means differ by rounding are equal
    assert counts([np.full(12, 0.1, np.float32)], exact) == (2, 0, 0)


def test_one_function_that_pays_them_is_enough():
    assert counts([np.zeros(12), RIGHT], exact, by_key) == (2, 2, 0)
    assert counts([~RIGHT, np.zeros(12)], exact, by_key) == (2, 0, 2)


def test_functions_that_ignore_the_answer_and_missing_rewards_do_not_count():
    assert counts([RIGHT], unrelated) == (None, None, None)
    assert counts([np.zeros(12), RIGHT], exact, unrelated) == (2, 0, 0)
    missing = np.where(GROUP == 0, np.nan, RIGHT)
    assert counts([missing], exact) == (1, 1, 0)
    assert count_paid_answers([], [], np.zeros((0, 1)), [exact], np.zeros(0, int)) == {}
