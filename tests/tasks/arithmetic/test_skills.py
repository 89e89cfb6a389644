"""Every question has one right answer, in a form that can be read."""

import pytest

from klinic.tasks.arithmetic.skills import SKILLS

EXAMPLES = {
    "addition": ("47+38=", "85"),
    "subtraction": ("71-25=", "46"),
    "copying": ("copy 4821=", "4821"),
    "reversing": ("reverse 4821=", "1284"),
    "comparing": ("compare 52 17=", ">"),
}
NUM_QUESTIONS = {"subtraction": 90 * 91 // 2}  # differences are never negative


@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
def test_all_questions_are_asked_once_with_the_right_answer(skill):
    questions = list(skill.questions())
    answers = {question.prompt: question.answer for question in questions}
    prompt, answer = EXAMPLES[skill.name]
    assert answers[prompt] == answer
    assert len(answers) == len(questions) == NUM_QUESTIONS.get(skill.name, 10_000)


@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
def test_every_answer_has_the_form_of_its_skill(skill):
    assert all(skill.answer_format.fullmatch(question.answer) for question in skill.questions())


def test_only_sums_that_carry_have_a_slip_and_it_forgets_the_carry():
    slips = {q.prompt: q.wrong_answer for skill in SKILLS.values() for q in skill.questions()}
    assert [slips[f"{s}="] for s in ("47+38", "9+1", "95+95", "41+38", "90+90")] == [
        *("75", "0", "180"),
        *(None, None),
    ]
    assert sum(slip is not None for slip in slips.values()) == 4500


def test_equal_numbers_are_equal():
    answers = {question.prompt: question.answer for question in SKILLS["comparing"].questions()}
    assert [answers[f"compare {a}="] for a in ("7 7", "7 70", "70 7")] == ["=", "<", ">"]


@pytest.mark.torch
def test_the_tiny_tokenizer_knows_every_character():
    from klinic.model.tiny import CHARACTERS

    for skill in SKILLS.values():
        for question in skill.questions():
            assert set(question.prompt + question.answer) <= set(CHARACTERS)
