"""What is written is read back, and nothing a model writes is more than text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.tasks.chess.notation import (
    Outcome,
    count_sections,
    environment_answer,
    environment_prompt,
    policy_answer,
    policy_prompt,
    position_of,
    read_analysis,
    read_outcome,
)

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
SQUARES = st.from_regex(r"[a-h][1-8]", fullmatch=True)
MOVES = st.builds(str.__add__, SQUARES, SQUARES)
PAWNS = st.floats(-100, 100).map("{:.1f}".format)


def test_prompts_are_those_of_the_models_card():
    assert policy_prompt(START) == f"P: {START}"
    assert environment_prompt(START, "e2e4", ["e2e4"]) == f"A: {START}+e2e4+e2e4+"


@given(st.lists(st.tuples(MOVES, PAWNS), min_size=1, max_size=5))
def test_an_analysis_is_read_as_it_was_written(lines):
    moves, pawns = zip(*lines, strict=True)
    said = read_analysis(policy_answer(moves, pawns, moves[0]))
    assert (said.moves, said.evaluations, said.best) == (moves, pawns, moves[0])
    assert said.is_well_formed


def test_the_padding_of_the_family_is_read():
    said = read_analysis("   M: e2e4 d2d4      E: 0.3 -0.2      B: e2e4   ")
    assert said.moves == ("e2e4", "d2d4")
    assert said.evaluations == ("0.3", "-0.2")


def test_an_outcome_is_read_as_it_was_written_with_or_without_the_last_plus():
    outcome = Outcome(position=START, reward="0.001", ended="0", illegal="0")
    assert read_outcome(environment_answer(outcome)) == outcome
    assert read_outcome(environment_answer(outcome) + "+") == outcome


def test_both_prompts_hold_their_position():
    assert position_of(policy_prompt(START)) == START
    assert position_of(environment_prompt(START, "e2e4", ["e2e4"])) == START


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("", 0),
        ("infancy neoc Anth Booker", 0),
        (" M: e2e4", 1),
        (" M: e2e4 B: e2e4", 1),
        (" M: e2e4 E: 0.1", 2),
        (" E: 0.1 M: e2e4", 1),
        (" M: e2e4 E: 0.1 B: e2e4", 3),
        (" M: e2e4 M: e2e4 E: 0.1 B: e2e4", 0),
    ],
)
def test_sections_count_once_and_in_their_order(text, num):
    assert count_sections(text) == num


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M:",
        "M: e2e4 E: 0.1 B:",
        "M: e2e4 E: 0.1 B: e2e4 e2e4",
        "so M: e2e4 E: 0.1 B: e2e4",
        "M: e2e4 E: 0.1 B: e2e4 M: e2e4 E: 0.1 B: e2e4",
    ],
)
def test_what_is_no_analysis_is_none(text):
    assert read_analysis(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "M: e2e9 E: 0.1 B: e2e4",
        "M: e2e4 E: lots B: e2e4",
        "M: e2e4 d2d4 E: 0.1 B: e2e4",
        "M: E: B: e2e4",
        "M: e2e4 E: nan B: e2e4",
    ],
)
def test_an_analysis_may_be_whole_and_not_well_formed(text):
    assert not read_analysis(text).is_well_formed


@given(st.text(max_size=200))
def test_any_text_is_read_without_an_error(text):
    for said in (text, f" M: {text} E: {text} B: {text}", f"{text}+{text}+0+1"):
        read_analysis(said)
        read_outcome(said)


def test_an_endless_completion_is_not_read_to_its_end():
    assert read_analysis("M: " + "e2e4 " * 10**6 + "E: 0.1 B: e2e4") is None
