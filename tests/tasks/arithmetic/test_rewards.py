"""Rewards of arithmetic, completion by completion."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError
from klinic.tasks.arithmetic.rewards import binary, graduated, parse
from klinic.tasks.arithmetic.skills import SKILLS
from klinic.tasks.arithmetic.task import TASK

TEXT = st.text(alphabet="0123456789<>=-+ ab\n", max_size=8)
ROWS = st.sampled_from([row for skill in SKILLS for row in TASK.eval_rows(skill, 5)])


def rewarded(reward, completion, answer, skill="addition"):
    (value,) = reward(prompts=["?"], completions=[completion], answer=[answer], skill=[skill])
    return value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("85", "85", 1.0),
        (" 85\n", "85", 1.0),
        ("84", "85", 0.45),  # the tens
        ("15", "85", 0.45),  # the units
        ("12", "85", 0.1),
        ("5", "85", 0.45),  # units stand under units
        ("8", "85", 0.1),
        ("185", "85", 0.1 + 0.7 * 2 / 3),
        ("85858585", "85", 0.1 + 0.7 * 2 / 8),
        ("085", "85", -0.3),
        ("-85", "85", -0.3),
        ("8 5", "85", -0.3),
        ("85=", "85", -0.3),
        ("", "85", -0.3),
        ("\u0668\u0665", "85", -0.3),  # digits, but not of this alphabet
    ],
)
def test_a_part_of_the_digits_earns_a_part_of_the_reward(completion, answer, value):
    assert rewarded(graduated, completion, answer) == pytest.approx(value)


def test_other_skills_have_answers_of_other_forms():
    assert rewarded(graduated, "0421", "0421", "copying") == 1.0
    assert rewarded(graduated, "<", ">", "comparing") == pytest.approx(0.1)
    assert rewarded(graduated, "5", ">", "comparing") == -0.3
    assert rewarded(graduated, ">", "85", "addition") == -0.3


@given(ROWS, TEXT)
def test_both_rewards_agree_with_what_is_correct(row, completion):
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    for completion_ in (completion, row["answer"]):
        correct = TASK.is_correct(row, completion_)
        for reward in (binary, graduated):
            (value,) = reward([row["prompt"]], [completion_], **columns)
            assert (value == 1.0) == correct


@given(ROWS, TEXT)
def test_an_answer_earns_from_a_tenth_on_and_nonsense_a_loss(row, completion):
    value = rewarded(graduated, completion, row["answer"], row["skill"])
    if parse(row, completion) is None:
        assert value == -0.3
    else:
        assert value == 1.0 or 0.1 <= value < 0.8


def test_binary_knows_nothing_between():
    assert [rewarded(binary, text, "85") for text in ("85", "84", "", "085")] == [1.0, 0, 0, 0]


def test_an_endless_answer_is_judged_without_reading_it_as_a_number():
    assert rewarded(graduated, "1" * 10_000, "85") == pytest.approx(0.1, abs=1e-3)


def test_an_unknown_skill_is_refused():
    with pytest.raises(ConfigError, match="no skill of arithmetic 'juggling'"):
        rewarded(graduated, "85", "85", "juggling")
