"""Word problems: rows as chats with a number, and numbers that are equal however written."""

import pytest

from klinic.tasks.math import rewards
from klinic.tasks.math.gsm8k import row


def turns(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_rows_are_chats_with_a_number():
    found = row({"question": "2+2?", "answer": "add them\n#### 1,004"})
    assert found["answer"] == "1,004"
    assert [message["role"] for message in found["prompt"]] == ["system", "user"]


@pytest.mark.filterwarnings("ignore")
def test_answers_are_compared_as_numbers():
    pytest.importorskip("math_verify")
    said = turns(r"so \boxed{1004}", "it is 1,004.", r"\boxed{12}", "no idea", r"\boxed{\frac12}")
    right = ["1,004", "1,004", "13", "5", "0.5"]
    assert rewards.correct(said, answer=right) == [1, 1, 0, 0, 1]
    assert rewards.boxed(said) == [1, 0, 1, 0, 1]
    assert rewards.correct(["it is 7"], answer=["7"]) == [1]
