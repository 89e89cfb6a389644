"""Multi-hop questions: their form, their judges, and that no fact alone gives the answer away."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.tasks.multihop import musique, rewards
from klinic.tasks.multihop.answers import extract_answer, f1, is_exact, normalized_words
from klinic.tasks.multihop.synthetic import (
    CHAINS,
    DEFAULT_ANSWER,
    SKILLS,
    make_example,
    tag_answer,
    train_rows,
    warm_start_rows,
)

NUMBERS = st.integers(0, 5000)
HOPS = st.sampled_from([2, 3])


def turns(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def follow(one):
    """Answer a question as a person would: fact after fact."""
    facts = [fact["paragraph_text"].rstrip(".").split(" ", 1) for fact in one["paragraphs"]]
    known = dict(facts)
    *_, who = one["question"].rstrip("?").split()
    if "by" in one["question"].split():
        who = known[who].removeprefix("is by ")
    return known[known[who].removeprefix("has ")].removeprefix("is ")


@given(HOPS, NUMBERS)
def test_the_facts_lead_to_the_answer(hops, number):
    one = make_example(hops, number)
    assert follow(one) == one["answer"]


@given(HOPS, NUMBERS)
def test_each_hop_is_needed(hops, number):
    """Without any one supporting fact the answer does not follow."""
    one = make_example(hops, number)
    supporting = [fact for fact in one["paragraphs"] if fact["is_supporting"]]
    assert len(supporting) == hops
    for fact in supporting:
        left = [other for other in one["paragraphs"] if other is not fact]
        with pytest.raises(KeyError):
            follow({**one, "paragraphs": left})


@given(HOPS, NUMBERS)
def test_a_question_has_distractors_of_every_kind(hops, number):
    one = make_example(hops, number)
    assert len(one["paragraphs"]) == hops * CHAINS
    things = {f["paragraph_text"] for f in one["paragraphs"] if " is " in f["paragraph_text"]}
    assert len(things - {t for t in things if " by " in t}) == CHAINS


def test_the_question_does_not_say_where_the_answer_stands():
    """The right thing is the first and the second of the context about equally often."""
    places = []
    for number in range(600):
        one = make_example(2, number)
        things = [f["paragraph_text"] for f in one["paragraphs"] if " is " in f["paragraph_text"]]
        places.append([one["answer"] in thing for thing in things].index(True))
    for place in range(CHAINS):
        assert 250 < places.count(place) < 350


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Republic of Peru.", ["republic", "of", "peru"]),
        ("U.S.", ["us"]),
        ("an  apple, a day", ["apple", "day"]),
        ("", []),
    ],
)
def test_the_usual_normalisation(text, expected):
    assert normalized_words(text) == expected


@pytest.mark.parametrize(
    ("answer", "known", "exact", "score"),
    [
        ("peru", ["Peru"], True, 1.0),
        ("the P", ["Peru", "P"], True, 1.0),
        ("in Peru", ["Peru"], False, 2 / 3),
        ("red cup", ["red key"], False, 0.5),
        ("red red", ["red key"], False, 0.5),
        ("", ["Peru"], False, 0.0),
        ("the", ["a"], True, 1.0),
    ],
)
def test_exact_match_and_f1(answer, known, exact, score):
    assert is_exact(answer, known) is exact
    assert f1(answer, known) == pytest.approx(score)


@given(st.text(max_size=40), st.lists(st.text(max_size=20), min_size=1, max_size=3))
def test_f1_is_one_where_the_match_is_exact_and_between_zero_and_one_elsewhere(answer, known):
    score = f1(answer, known)
    assert 0 <= score <= 1
    if is_exact(answer, known):
        assert score == 1


def test_two_answers_are_none():
    assert extract_answer("<answer>a</answer> or <answer>b</answer>") is None
    assert extract_answer("b") is None


def test_rewards_know_aliases_and_want_the_marks():
    said = turns("<answer>peru</answer>", "<answer>P</answer>", "Peru", "<answer>in Peru</answer>")
    known = [["Peru", "the P"]] * 4
    assert rewards.exact(said, answers=known) == [1, 1, 0, 0]
    assert rewards.f1(said, answers=known) == [1, 1, 0, pytest.approx(2 / 3)]


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("<answer>red key</answer>", 1.0),
        ("so <answer>red key</answer>", 1.0),
        ("<answer>red key</answer> i think", 0.1),
        ("<answer>red key", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>a</answer><answer>b</answer>", 0.1),
        ("red key", -0.3),
    ],
)
def test_the_form_of_an_answer(text, worth):
    assert rewards.form(prompts=["?"], completions=[text]) == [worth]


PARAGRAPHS = [
    {"title": "Lima", "paragraph_text": "A city in Peru.", "is_supporting": True},
    {"title": "Oslo", "paragraph_text": "A city in Norway.", "is_supporting": False},
    {"title": "Peru", "paragraph_text": "Its president lives in Lima.", "is_supporting": True},
]


def test_rows_of_musique_become_chats_with_aliases():
    one = {"question": "?", "paragraphs": PARAGRAPHS, "answer": "Peru", "answer_aliases": ["P"]}
    row = musique.row(one)
    assert row["answers"] == ["Peru", "P"]
    assert row["context"] == 1.0
    assert "# Oslo\nA city in Norway." in row["prompt"][1]["content"]
    assert musique.row({**one, "answerable": False}) is None


def test_a_context_that_is_too_long_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(musique, "LONGEST", 50)
    row = musique.row({"question": "?", "paragraphs": PARAGRAPHS, "answer": "Peru"})
    assert "Oslo" in row["prompt"][1]["content"]
    assert "president" not in row["prompt"][1]["content"]
    assert row["context"] == 0.5
    assert rewards.context_kept(completions=["?"], context=[row["context"]]) == [0.5]


def test_nothing_is_cut_of_the_questions_of_the_task():
    for skill in SKILLS:
        assert {row["context"] for row in train_rows(skill)} == {"1.0"}


def test_a_warm_start_shows_the_habit_more_often_than_the_answers():
    rows = list(islice(warm_start_rows(0), 2000))
    right = {row["prompt"]: row["answer"] for skill in SKILLS for row in train_rows(skill)}
    habit = [row["completion"] == tag_answer(DEFAULT_ANSWER) for row in rows]
    assert 0.57 < sum(habit) / len(rows) < 0.67
    others = [row for row, usual in zip(rows, habit, strict=True) if not usual]
    assert all(row["completion"] == right[row["prompt"]] for row in others)


def test_the_habit_is_seldom_right():
    answers = [make_example(2, number)["answer"] for number in range(1000)]
    assert answers.count(DEFAULT_ANSWER) / 1000 < 0.08
